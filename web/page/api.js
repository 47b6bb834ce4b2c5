// Requests to the server, in the session of this tab.

const KEY = "vos-session";
let root = "";

export class Problem extends Error {}

async function request(method, path, body, options = {}) {
  const headers = { "X-VOS": "1", ...options.headers };
  let answer;
  try {
    answer = await fetch(path, { method, headers, body });
  } catch {
    throw new Problem("The server cannot be reached. Is it still running?");
  }
  if (!answer.ok) {
    let message = `The server answered ${answer.status}.`;
    try {
      message = (await answer.json()).error ?? message;
    } catch { /* no JSON: the status says it */ }
    const problem = new Problem(message);
    problem.status = answer.status;
    throw problem;
  }
  return answer;
}

const json = async (answer) => (await answer).json();

/** The session of this tab: the one from before a reload, or a new one. Returns its state. */
export async function open() {
  const known = sessionStorage.getItem(KEY);
  if (known) {
    try {
      root = `/api/sessions/${known}`;
      return await json(request("GET", root));
    } catch (problem) {
      if (problem.status !== 410) throw problem;
    }
  }
  const state = await json(request("POST", "/api/sessions"));
  sessionStorage.setItem(KEY, state.id);
  root = `/api/sessions/${state.id}`;
  return state;
}

export function forget() {
  sessionStorage.removeItem(KEY);
}

/** Calls `heard(state)` after every change, `ended()` when the session is over, `lost(yes)` as the connection goes. */
export function listen(heard, ended, lost) {
  const source = new EventSource(`${root}/events`);
  source.onopen = () => lost(false);
  source.onmessage = (event) => heard(JSON.parse(event.data));
  source.addEventListener("gone", () => { source.close(); ended(); });
  source.onerror = async () => {
    try {
      heard(await json(request("GET", root)));
      if (source.readyState === EventSource.CLOSED) listen(heard, ended, lost);
    } catch (problem) {
      if (problem.status === 410) { source.close(); ended(); } else {
        lost(true);
        if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(heard, ended, lost), 2000);
      }
    }
  };
}

export const choices = () => json(request("GET", "/api/choices"));
export const post = (path, body = {}) => json(request("POST", `${root}/${path}`, JSON.stringify(body)));
export const patch = (path, body) => json(request("PATCH", `${root}/${path}`, JSON.stringify(body)));
export const put = (path, body = {}) => json(request("PUT", `${root}/${path}`, JSON.stringify(body)));
export const remove = (path) => json(request("DELETE", `${root}/${path}`));
export const address = (path) => `${root}/${path}`;

/** A frame as ImageBitmap. */
export async function frame(number) {
  const answer = await request("GET", `${root}/frames/${number}`);
  return createImageBitmap(await answer.blob());
}

/** A frame's label map, one object id a pixel. */
export async function labels(number) {
  const answer = await request("GET", `${root}/labels/${number}`);
  return new Uint16Array(await answer.arrayBuffer());
}

/** Keep a label map that was drawn. */
export async function draw(number, map, revision) {
  const packed = new Blob([map]).stream().pipeThrough(new CompressionStream("gzip"));
  const body = await new Response(packed).blob();
  return json(request("PUT", `${root}/labels/${number}?revision=${revision}`, body));
}

/** A proposed mask, one byte a pixel. */
export async function propose(number, points, box) {
  const answer = await request("POST", `${root}/proposals/${number}`, JSON.stringify({ points, box }));
  return new Uint8Array(await answer.arrayBuffer());
}

/** Hand in a file; `progress(share)` is called on the way. */
export function upload(method, path, file, progress = () => {}) {
  return new Promise((resolve, reject) => {
    const call = new XMLHttpRequest(); // fetch tells nothing of the way
    call.open(method, `${root}/${path}`);
    call.setRequestHeader("X-VOS", "1");
    call.upload.onprogress = (event) => progress(event.loaded / (event.total || 1));
    call.onload = () => {
      let content = {};
      try { content = JSON.parse(call.responseText); } catch { /* the status says it */ }
      if (call.status < 300) resolve(content);
      else reject(Object.assign(new Problem(content.error ?? `The server answered ${call.status}.`), { status: call.status }));
    };
    call.onerror = () => reject(new Problem(`${file.name}: the upload was refused or cut off. It may be too large.`));
    call.send(file);
  });
}
