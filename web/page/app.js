// The page: what the server says, what a person does, and the parts that show it.

import * as api from "./api.js";
import { bind, list } from "./keys.js";
import { Timeline } from "./timeline.js";
import { History, Tools } from "./tools.js";
import { View } from "./view.js";

const CACHE_BYTES = 192 * 2 ** 20; // of frames kept for going back and forth
const MODES = ["overlay", "outline", "side", "cutout"];
const HINTS = {
  brush: "Brush: draw the chosen object. Keys: W A S D move, Space draws.",
  eraser: "Eraser: takes pixels from the chosen object; with Shift from any.",
  polygon: "Polygon: click the corners, Enter or a double click closes it, Backspace takes one back.",
  click: "Click an object for a proposal; Shift+click says what is not of it.",
  box: "Drag a box around an object for a proposal.",
};
const VIDEO = /\.(mp4|m4v|mov|mkv|webm|avi|m?ts|mpe?g|ogv|flv|wmv|gif|3gp|mxf|y4m)$/i;
const IMAGE = /\.(jpe?g|png|bmp|webp|tiff?)$/i;
const WEIGHTS = /\.(safetensors|pth|pt|ckpt)$/i;

const $ = (id) => document.getElementById(id);
const view = new View($("view"));
const history = new History();
const timeline = new Timeline($("timeline"), (frame) => { pause(); show(frame); });
const tools = new Tools(view, {
  frame: () => current,
  object: async () => chosen || (await newObject()),
  changed: (change) => { history.add(change); save(change.frame); },
  propose: (points, box) => busy(attempt(() => api.propose(current, points, box))),
  say: (text) => { $("hint").textContent = text; },
});

let state = null; // what the server said last
let revision = -1;
let current = -1, wanted = 0, loading = null, stale = false; // frames: shown, to be shown
let chosen = 0; // object id
let saved = Promise.resolve(); // the saves so far
let playing = false;
let exporting = false;
let told = 0; // number of the last job whose end was told
let renaming = false;
const frames = new Map(); // number -> promise of an ImageBitmap, oldest use first

// Messages

let toastTimer = 0;
function toast(message, bad = false, offer = null) {
  clearTimeout(toastTimer);
  const box = $("toast");
  box.hidden = false;
  box.className = bad ? "bad" : "";
  box.querySelector("span").textContent = message;
  box.querySelector(".offer")?.remove();
  if (offer) {
    const button = document.createElement("button");
    button.className = "offer";
    button.textContent = offer.label;
    button.onclick = () => { hideToast(); offer.run(); };
    box.querySelector("span").after(button);
    button.focus();
  }
  if (!bad) toastTimer = setTimeout(hideToast, 5000);
}

function hideToast() {
  const was = !$("toast").hidden;
  $("toast").hidden = true;
  return was;
}

/** Do something that may fail; says why. */
async function attempt(work) {
  try {
    return await work();
  } catch (problem) {
    if (problem.status === 410) ended();
    else toast(problem.message, true);
    if (!(problem instanceof api.Problem)) throw problem;
    return undefined;
  }
}

/** Ask the server for a change; its answer is the new state. */
const change = (work) => busy(attempt(async () => heard(await work())));

function ended() {
  if (!$("ended").open) $("ended").showModal();
}

let pending = 0;
/** Note on the page that something is under way, until a promise is kept. */
function busy(promise) {
  const note = (step) => { pending += step; document.body.dataset.busy = pending ? "yes" : "no"; };
  note(1);
  promise.catch(() => {}).then(() => note(-1));
  return promise;
}

// Frames

function getFrame(number) {
  const known = frames.get(number);
  if (known) {
    frames.delete(number);
    frames.set(number, known);
    return known;
  }
  const coming = api.frame(number);
  coming.catch(() => frames.delete(number));
  frames.set(number, coming);
  const room = Math.max(3, Math.floor(CACHE_BYTES / (4 * view.width * view.height)));
  for (const key of frames.keys()) {
    if (frames.size <= room) break;
    frames.get(key).then((bitmap) => { if (bitmap !== view.frame) bitmap.close(); }, () => {});
    frames.delete(key);
  }
  return coming;
}

/** Show a frame; of many asked for while one loads, the last. */
function show(number, again = false) {
  if (!state?.video) return Promise.resolve();
  wanted = Math.min(state.video.length - 1, Math.max(0, number));
  stale ||= again;
  timeline.set({ frame: wanted });
  if (document.activeElement !== $("frame")) $("frame").value = wanted;
  loading ??= busy(load()).finally(() => { loading = null; });
  return loading;
}

async function load() {
  while (wanted !== current || stale) {
    const number = wanted, video = revision;
    stale = false;
    if (number !== current) tools.cancel();
    try {
      const [bitmap, labels] = await Promise.all([getFrame(number), saved.then(() => api.labels(number))]);
      if (video !== revision) continue;
      if (tools.stroke) { // the hand that draws comes first
        stale = true;
        await new Promise((done) => setTimeout(done, 50));
        continue;
      }
      current = number;
      view.show(bitmap, labels);
    } catch (problem) {
      if (video !== revision) continue;
      current = number;
      if (problem.status === 410) ended();
      else toast(problem.message, true);
      return;
    }
  }
}

function save(frame) {
  const labels = view.labels, video = revision;
  saved = busy(saved.then(() => attempt(async () => heard(await api.draw(frame, labels, video)))));
}

async function play() {
  playing = !playing;
  setIcon("play", playing ? "i-pause" : "i-play");
  if (!playing || !state?.video) return;
  if (wanted >= state.video.length - 1) wanted = -1;
  const pace = 1000 / Math.min(60, state.video.rate || 24);
  while (playing && wanted < state.video.length - 1) {
    const begin = performance.now();
    await show(wanted + 1);
    if (wanted + 1 < state.video.length) getFrame(wanted + 1).catch(() => {});
    await new Promise((done) => setTimeout(done, Math.max(0, pace - (performance.now() - begin))));
  }
  pause();
}

function pause() {
  playing = false;
  setIcon("play", "i-play");
}

function toMarked(step) {
  const others = state.marked.filter((frame) => (frame - wanted) * step > 0);
  if (others.length) show(step > 0 ? others[0] : others.at(-1));
}

// Objects

async function newObject() {
  const item = await busy(attempt(() => api.post("objects")));
  if (!item) return 0;
  if (!state.objects.some(({ id }) => id === item.id)) state.objects.push(item); // the events may have been faster
  choose(item.id);
  return item.id;
}

function choose(id) {
  chosen = id;
  renderObjects();
}

function chooseNext(step) {
  const ids = state.objects.map((item) => item.id);
  if (ids.length) choose(ids[(ids.indexOf(chosen) + step + ids.length) % ids.length]);
}

async function removeObject(id = chosen) {
  if (!id) return;
  const again = () => change(() => api.remove(`objects/${id}`));
  const back = () => change(() => api.post(`objects/${id}/restore`));
  await saved;
  const name = state.objects.find((item) => item.id === id).name;
  await again();
  history.add({ undo: back, redo: again });
  toast(`${name} was removed from all frames. Ctrl+Z brings it back.`);
}

function describe(id, values) {
  Object.assign(state.objects.find((item) => item.id === id), values); // seen at once, and by the next key
  renderObjects();
  return change(() => api.patch(`objects/${id}`, values));
}

function rename() {
  const label = document.querySelector("#objects li.chosen button.name");
  const item = state.objects.find(({ id }) => id === chosen);
  if (!label || !item) return;
  const input = document.createElement("input");
  input.type = "text";
  input.maxLength = 60;
  input.value = item.name;
  input.setAttribute("aria-label", "Name of the object");
  renaming = true;
  label.replaceWith(input);
  input.select();
  const done = (keep) => {
    if (!renaming) return;
    renaming = false;
    if (keep && input.value.trim()) describe(item.id, { name: input.value });
    shownObjects = "";
    renderObjects();
    view.canvas.focus({ preventScroll: true });
  };
  input.onkeydown = (event) => {
    event.stopPropagation();
    if (event.key === "Enter") done(true);
    if (event.key === "Escape") done(false);
  };
  input.onblur = () => done(true);
}

let shownObjects = "";
function renderObjects() {
  if (!state.objects.some(({ id }) => id === chosen)) chosen = state.objects[0]?.id ?? 0;
  const now = JSON.stringify([state.objects, chosen]);
  if (now === shownObjects || renaming) return;
  shownObjects = now;
  view.chosen = chosen;
  view.setObjects(state.objects);
  $("objects").replaceChildren(...state.objects.map((item, place) => {
    const row = document.createElement("li");
    row.className = item.id === chosen ? "chosen" : "";
    const color = document.createElement("input");
    color.type = "color";
    color.value = item.color;
    color.setAttribute("aria-label", `Colour of ${item.name}`);
    color.onchange = () => describe(item.id, { color: color.value });
    const name = document.createElement("button");
    name.className = "name";
    name.setAttribute("aria-pressed", item.id === chosen);
    const text = document.createElement("span");
    text.textContent = item.name;
    name.append(text);
    name.onclick = () => choose(item.id);
    name.ondblclick = () => { choose(item.id); rename(); };
    const key = document.createElement("kbd");
    key.textContent = place < 9 ? place + 1 : "";
    key.hidden = place > 8;
    row.append(color, name, key,
      iconButton(item.hidden ? "i-hidden" : "i-eye", `${item.hidden ? "Show" : "Hide"} ${item.name}`, () => describe(item.id, { hidden: !item.hidden })),
      iconButton("i-close", `Remove ${item.name}`, () => removeObject(item.id)));
    return row;
  }));
  document.querySelector("#objects li.chosen")?.scrollIntoView({ block: "nearest" });
}

function iconButton(icon, label, run) {
  const button = document.createElement("button");
  button.className = "icon";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.innerHTML = `<svg><use href="#${icon}"/></svg>`;
  button.onclick = run;
  return button;
}

function setIcon(action, icon) {
  document.querySelector(`[data-action="${action}"] use`).setAttribute("href", `#${icon}`);
}

// Undo

async function step(from, to, name) {
  const item = from.pop();
  if (!item) return;
  tools.cancel();
  if (item.before) {
    await show(item.frame);
    if (current !== item.frame) return;
    view.paint(item.apply(view.labels, name === "undo" ? item.before : item.after));
    save(item.frame);
  } else {
    await item[name]();
    await show(current, true);
  }
  to.push(item);
}

const undo = () => step(history.past, history.future, "undo");
const redo = () => step(history.future, history.past, "redo");

async function clearFrame() {
  await saved;
  const before = view.labels.slice(), frame = current;
  const again = async () => { await change(() => api.remove(`labels/${frame}`)); await show(frame, true); };
  const back = async () => { await show(frame); view.labels.set(before); view.paint(); save(frame); await saved; };
  await again();
  history.add({ undo: back, redo: again, bytes: 2 * before.length });
}

// Tracking and files

async function track(backwards) {
  await saved;
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  await change(() => api.post("track", {
    frame: wanted, backwards, checkpoint: $("checkpoint").value, model: $("model-name").value, device: $("device").value,
    max_long_edge: number("max_long_edge"), max_memory_frames: number("max_memory_frames"), long_term_gap: number("long_term_gap"),
  }));
}

async function exportAs(kind) {
  await saved;
  exporting = true;
  const opacity = view.mode === "outline" ? 0 : view.opacity;
  if (!(await change(() => api.post("exports", { kind, object: chosen, opacity })))) exporting = false;
}

function download(file) {
  const link = document.createElement("a");
  link.href = api.address(`exports/${encodeURIComponent(file)}`);
  link.download = file;
  document.body.append(link);
  link.click();
  link.remove();
}

const share = (name) => (part) => toast(`${name}: ${Math.round(100 * part)} % handed in`);

async function openVideo(file) {
  pause();
  if (await change(() => api.upload("POST", `video?name=${encodeURIComponent(file.name)}`, file, share(file.name)))) {
    toast(`${file.name} is open. Mark an object, then track.`);
  }
}

async function openFolder(files) {
  pause();
  const images = files.filter((file) => IMAGE.test(file.name) && !file.name.startsWith("."));
  if (!images.length) { toast("There is no image in that folder.", true); return; }
  const title = images[0].webkitRelativePath.split("/")[0] || "frames";
  const done = await change(async () => {
    await api.post("folder");
    for (const [i, file] of images.entries()) {
      await api.upload("PUT", `folder/${encodeURIComponent(file.name)}`, file);
      if (i % 10 === 0) share(title)(i / images.length);
    }
    return api.put("folder", { title });
  });
  if (done) toast(`${title} is open, ${images.length} frames. Mark an object, then track.`);
}

async function openMask(file, snap = false) {
  await saved;
  const frame = wanted;
  try {
    heard(await api.upload("POST", `masks/${frame}?name=${encodeURIComponent(file.name)}&snap=${snap}&object=${chosen}`, file));
    await show(current, true);
    if (state.job?.kind !== "import") toast(`${file.name} is the mask of frame ${frame}.`);
  } catch (problem) {
    const offer = !snap && problem.message.includes("snap_colors");
    const text = offer ? "This mask has soft edges or noise in place of one flat colour for each object." : problem.message;
    if (problem.status === 410) ended();
    else toast(text, true, offer ? { label: "Snap to its main colours", run: () => openMask(file, true) } : null);
  }
}

async function openWeights(file) {
  const done = await change(() => api.upload("POST", `checkpoints?name=${encodeURIComponent(file.name)}`, file, share(file.name)));
  if (done) {
    $("checkpoint").value = file.name;
    toast(`${file.name} is chosen. If it does not say which model it holds, choose that too.`);
  }
}

function openAny(file) {
  const current = WEIGHTS.test(file.name) ? openWeights : VIDEO.test(file.name) ? openVideo : openMask;
  return current(file);
}

// What the server says

/** Take over a state; returns it. */
function heard(next) {
  if (!next || !("revision" in next) || next.serial < state?.serial) return next; // answers may overtake each other
  const before = state;
  state = next;
  if (!next.video) return next;
  if (next.revision !== revision) {
    revision = next.revision;
    frames.clear();
    history.clear();
    tools.reset();
    current = -1;
    chosen = 0;
    view.begin(next.video.width, next.video.height);
    const { title, width, height, length } = next.video;
    $("title").textContent = `${title}   ${width} × ${height}, ${length} frames, ${+next.video.rate.toFixed(2)} a second`;
    $("length").textContent = `/ ${length - 1}`;
    $("frame").max = length - 1;
    show(0, true);
  }
  renderObjects();
  renderJob(next.job);
  renderWeights(next.checkpoints);
  const job = next.job, running = job?.state === "running";
  timeline.set({
    length: next.video.length, labelled: next.labelled, marked: next.marked,
    running: running && job.kind === "track" ? job.notes.frame ?? null : null,
  });
  if (running && job.kind === "track" && job.done > 0) {
    if ($("follow").checked && !playing && !tools.stroke && !tools.mask && !tools.polygon.length) show(job.notes.frame, true);
    else if (job.notes.frame === current) show(wanted, true);
  }
  const ids = (objects) => (objects ?? []).map(({ id }) => id).join();
  if (before && before.revision === next.revision && ids(before.objects) !== ids(next.objects)) show(wanted, true);
  return next;
}

function renderJob(job) {
  const running = job?.state === "running";
  $("job").hidden = !running;
  for (const id of ["track", "track-back", "export-masks", "export-coco", "export-overlay", "export-webm", "export-mov"]) {
    document.querySelector(`[data-action="${id}"]`).disabled = running;
  }
  if (!job) { $("figures").textContent = ""; return; }
  const { kind, done, total, rate, notes } = job;
  if (running) {
    $("progress").max = total || 1;
    $("progress").value = done;
    const words = { track: "Tracking", export: "Writing", import: "Reading" }[kind];
    $("job-text").textContent = notes.doing && !done ? `${notes.doing} …` : `${words} ${done} / ${total}`;
  }
  if (kind === "track" && notes.memory_bytes) {
    const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
    const parts = [`${rate.toFixed(1)} frames/s`, `${Math.round(notes.memory_bytes / 2 ** 20)} MB in use`,
      count(notes.objects, "object"), `${count(notes.memory_frames, "frame")} in memory`];
    $("figures").replaceChildren(...parts.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
  }
  if (!running && job.number !== told) {
    told = job.number;
    toast(job.message, job.state === "failed");
    if (kind !== "export") show(wanted, true);
    else if (exporting && job.state === "done") download(notes.file);
    exporting = false;
  }
}

function options(select, items) {
  const value = select.value;
  const now = JSON.stringify(items);
  if (select.dataset.items === now) return;
  select.dataset.items = now;
  select.replaceChildren(...items.map((item) => new Option(item.label, item.value)));
  if (items.some((item) => item.value === value)) select.value = value;
}

const renderWeights = (names) => options($("checkpoint"), names.map((name) => ({ value: name, label: name })));

// Actions

function setTool(name) {
  tools.choose(name);
  for (const tool of Object.keys(HINTS)) {
    document.querySelector(`[data-action="${tool}"]`).setAttribute("aria-pressed", tool === name);
  }
  $("hint").textContent = HINTS[name];
}

function setSize(size) {
  tools.size = Math.min(400, Math.max(1, Math.round(size)));
  $("size").value = tools.size;
  $("size-shown").textContent = tools.size;
  view.redraw();
}

function setMode(mode) {
  view.setMode(mode);
  for (const button of document.querySelectorAll("[data-mode]")) button.setAttribute("aria-checked", button.dataset.mode === mode);
}

function setOpacity(value) {
  view.opacity = Math.min(1, Math.max(0, value));
  $("opacity").value = Math.round(100 * view.opacity);
  $("opacity-shown").textContent = `${Math.round(100 * view.opacity)} %`;
  view.paint();
}

/** Move the keyboard's cursor by steps of what the eye can tell apart. */
function moveCursor(dx, dy, far) {
  const step = Math.max(1, Math.round((far ? 40 : 8) / view.scale));
  const from = tools.cursor ?? { x: view.width / 2, y: view.height / 2 };
  const inside = (value, most) => Math.min(most - 0.5, Math.max(0.5, value));
  const to = { x: inside(from.x + dx * step, view.width), y: inside(from.y + dy * step, view.height) };
  tools.byKeys = true;
  tools.move(to);
  view.reveal(to);
}

function escape() {
  if (tools.cancel()) $("hint").textContent = HINTS[tools.tool];
  else if (!hideToast()) pause();
  view.canvas.focus({ preventScroll: true });
}

const tool = (id, key, label) => ({ id, group: "Draw", keys: [key], label, run: () => setTool(id) });
const go = (id, keys, label, run) => ({ id, group: "Frames", keys, label, run });
const ACTIONS = [
  go("next", ["Right"], "Next frame", () => { pause(); show(wanted + 1); }),
  go("previous", ["Left"], "Previous frame", () => { pause(); show(wanted - 1); }),
  go("next-10", ["Shift+Right"], "Ten on", () => { pause(); show(wanted + 10); }),
  go("previous-10", ["Shift+Left"], "Ten back", () => { pause(); show(wanted - 10); }),
  go("first", ["Home"], "First frame", () => { pause(); show(0); }),
  go("last", ["End"], "Last frame", () => { pause(); show(Infinity); }),
  go("next-marked", ["PageDown"], "Next drawn frame", () => toMarked(1)),
  go("previous-marked", ["PageUp"], "Drawn frame before", () => toMarked(-1)),
  go("go-to", ["I"], "Go to a number", () => $("frame").select()),
  go("play", ["P"], "Play, pause", play),

  tool("brush", "B", "Brush"),
  tool("eraser", "E", "Eraser"),
  tool("polygon", "G", "Polygon"),
  tool("click", "C", "Propose by clicks"),
  tool("box", "X", "Propose by a box"),
  { id: "smaller", group: "Draw", keys: ["["], label: "Smaller brush", run: () => setSize(Math.min(tools.size - 1, tools.size / 1.25)) },
  { id: "larger", group: "Draw", keys: ["]"], label: "Larger brush", run: () => setSize(Math.max(tools.size + 1, tools.size * 1.25)) },
  { id: "cursor", group: "Draw", keys: ["W", "A", "S", "D", "Shift+W", "Shift+A", "Shift+S", "Shift+D"],
    shown: ["Shift+", "W", "A", "S", "D"], label: "Cursor (far)",
    run: (name) => moveCursor(...{ W: [0, -1], A: [-1, 0], S: [0, 1], D: [1, 0] }[name.at(-1)], name.length > 1) },
  { id: "press", group: "Draw", keys: ["Space", "Shift+Space"], shown: ["Space"], label: "Mouse button, at the cursor", once: true,
    run: (name, event) => { tools.byKeys = true; tools.down(tools.cursor ?? { x: view.width / 2, y: view.height / 2 }, event); },
    release: () => tools.up() },
  { id: "accept", group: "Draw", keys: ["Enter"], label: "Take proposal, close polygon",
    run: async () => { if (await tools.accept()) $("hint").textContent = HINTS[tools.tool]; } },
  { id: "escape", group: "Draw", keys: ["Esc"], label: "Drop what is begun", run: escape },
  { id: "back", group: "Draw", keys: ["Backspace"], label: "Take back the last point", run: () => tools.back() },
  { id: "undo", group: "Draw", keys: ["Ctrl+Z"], label: "Undo", run: undo },
  { id: "redo", group: "Draw", keys: ["Ctrl+Shift+Z", "Ctrl+Y"], label: "Redo", run: redo },
  { id: "clear-frame", group: "Draw", keys: ["Shift+Backspace"], label: "Clear this frame", run: clearFrame },

  { id: "choose", group: "Objects", keys: [..."123456789"], shown: ["1", "…", "9"], label: "Choose",
    run: (name) => { const item = state.objects[Number(name) - 1]; if (item) choose(item.id); } },
  { id: "choose-next", group: "Objects", keys: ["Down"], label: "Choose the next", run: () => chooseNext(1) },
  { id: "choose-before", group: "Objects", keys: ["Up"], label: "Choose the one before", run: () => chooseNext(-1) },
  { id: "new-object", group: "Objects", keys: ["N"], label: "New object", run: newObject },
  { id: "rename", group: "Objects", keys: ["F2"], label: "Rename", run: rename },
  { id: "color", group: "Objects", keys: ["K"], label: "Colour", run: () => document.querySelector("#objects li.chosen input")?.showPicker() },
  { id: "hide", group: "Objects", keys: ["H"], label: "Hide, show",
    run: () => { const item = state.objects.find(({ id }) => id === chosen); if (item) describe(chosen, { hidden: !item.hidden }); } },
  { id: "remove", group: "Objects", keys: ["Delete"], label: "Remove from all frames", run: () => removeObject() },

  { id: "track", group: "Track", keys: ["R"], label: "Track forwards from here", run: () => track(false) },
  { id: "track-back", group: "Track", keys: ["Shift+R"], label: "Track backwards from here", run: () => track(true) },
  { id: "stop", group: "Track", keys: ["Q"], label: "Stop, keep what is done", run: () => change(() => api.post("stop")) },
  { id: "follow", group: "Track", keys: ["F"], label: "Show frames as they are done", run: () => { $("follow").checked = !$("follow").checked; } },
  { id: "model", group: "Track", keys: ["J"], label: "Model, device, memory", run: () => { $("model").open = true; $("checkpoint").focus(); } },

  { id: "mode", group: "View", keys: ["V"], label: "Next way to view", run: () => setMode(MODES[(MODES.indexOf(view.mode) + 1) % MODES.length]) },
  { id: "fainter", group: "View", keys: ["O"], label: "Fainter overlay", run: () => setOpacity(view.opacity - 0.1) },
  { id: "stronger", group: "View", keys: ["Shift+O"], label: "Stronger overlay", run: () => setOpacity(view.opacity + 0.1) },
  { id: "backdrop", group: "View", keys: ["L"], label: "Background of the cut-out", run: () => $("backdrop").showPicker() },
  { id: "zoom-in", group: "View", keys: ["+", "="], shown: ["+"], label: "Zoom in", run: () => view.zoom(1.25) },
  { id: "zoom-out", group: "View", keys: ["-"], label: "Zoom out", run: () => view.zoom(0.8) },
  { id: "fit", group: "View", keys: ["0"], label: "Whole frame", run: () => view.fit() },
  { id: "pan", group: "View", keys: ["Ctrl+Left", "Ctrl+Right", "Ctrl+Up", "Ctrl+Down"], shown: ["Ctrl+arrows"], label: "Pan",
    run: (name) => view.pan(...{ Left: [40, 0], Right: [-40, 0], Up: [0, 40], Down: [0, -40] }[name.slice(5)]) },

  { id: "open-video", group: "Files", keys: ["U"], label: "Open a video", run: () => $("pick-video").click() },
  { id: "open-folder", group: "Files", keys: ["Shift+U"], label: "Open a folder of frames", run: () => $("pick-folder").click() },
  { id: "example", group: "Files", keys: ["Y"], label: "Start over with the first clip", run: () => change(() => api.post("bundled")) },
  { id: "load-mask", group: "Files", keys: ["M"], label: "Load masks: image, zip, json, alpha", run: () => $("pick-mask").click() },
  { id: "load-weights", group: "Files", keys: ["Shift+J"], label: "Load weights", run: () => $("pick-weights").click() },
  ...[["masks", "Export masks"], ["coco", "Export COCO JSON"], ["overlay", "Export the overlay"],
    ["webm", "Export the object with alpha, webm"], ["mov", "Export the object with alpha, mov"]].map(([kind, label], i) => (
    { id: `export-${kind}`, group: "Files", keys: [`Shift+${i + 1}`], label, run: () => exportAs(kind) })),
  { id: "help", group: "Files", keys: ["?", "F1"], label: "These keys", run: () => $("help").showModal() },
];

// Controls

bind(ACTIONS);
list(ACTIONS, $("keys"));
setTool("brush");
setMode("overlay");
$("toast").querySelector("button").onclick = hideToast;
$("size").oninput = () => setSize(Number($("size").value));
$("opacity").oninput = () => setOpacity($("opacity").value / 100);
$("backdrop").oninput = () => { view.backdrop = $("backdrop").value; view.paint(); };
$("frame").onchange = () => show(Math.round(Number($("frame").value)) || 0);
$("frame").onkeydown = (event) => {
  if (event.key === "Enter") { show(Math.round(Number($("frame").value)) || 0); view.canvas.focus({ preventScroll: true }); }
};
for (const button of document.querySelectorAll("[data-mode]")) button.onclick = () => setMode(button.dataset.mode);
for (const [id, take] of [["pick-video", openAny], ["pick-mask", openMask], ["pick-weights", openWeights]]) {
  $(id).onchange = () => { if ($(id).files.length) take($(id).files[0]); $(id).value = ""; };
}
$("pick-folder").onchange = () => { openFolder([...$("pick-folder").files]); $("pick-folder").value = ""; };
$("ended").onclose = () => { api.forget(); location.reload(); };

let panning = null;
const canvas = view.canvas;
canvas.onpointerdown = (event) => {
  if (!view.frame) return;
  canvas.focus({ preventScroll: true });
  canvas.setPointerCapture(event.pointerId);
  tools.byKeys = false;
  if (event.button === 0) tools.down(view.locate(event), event);
  else panning = event.pointerId;
  event.preventDefault();
};
canvas.onpointermove = (event) => {
  if (panning === event.pointerId) view.pan(event.movementX, event.movementY);
  tools.byKeys = false;
  tools.move(view.locate(event));
};
canvas.onpointerup = canvas.onpointercancel = (event) => {
  if (panning === event.pointerId) panning = null;
  else tools.up();
};
canvas.onpointerleave = () => { if (!tools.byKeys && !tools.stroke) { tools.cursor = null; view.redraw(); } };
canvas.ondblclick = () => tools.accept();
canvas.oncontextmenu = (event) => event.preventDefault();
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const area = canvas.getBoundingClientRect();
  view.zoom(Math.exp(-Math.sign(event.deltaY) * Math.min(0.3, Math.abs(event.deltaY) / 400)),
    { x: event.clientX - area.left, y: event.clientY - area.top });
}, { passive: false });

addEventListener("dragover", (event) => { event.preventDefault(); $("drop").hidden = false; });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidden = true; });
addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").hidden = true;
  const [file] = event.dataTransfer.files;
  if (file) openAny(file);
});

// Start

await attempt(async () => {
  const first = await api.open();
  if (first.job && first.job.state !== "running") told = first.job.number; // heard before a reload
  for (const [key, value] of Object.entries(first.defaults)) $(key).value = value ?? "";
  heard(first);
  api.listen(heard, ended, (gone) => {
    if (gone) toast("The connection to the server is lost; trying again.", true);
    else if ($("toast").textContent.includes("trying again")) hideToast();
  });
  const { devices, models, model } = await api.choices();
  options($("device"), devices);
  options($("model-name"), [{ value: "", label: "as the weights say" }, ...models.map((name) => ({ value: name, label: name }))]);
  $("model-name").value = model;
});
document.body.dataset.ready = "yes";
