// The tools that change a mask. The mouse and the keyboard's cursor call the same three functions: down, move, up.

const UNDO_STEPS = 300;
const UNDO_BYTES = 256 * 2 ** 20;

/** What a change of a label map did, to take it back: the values of a rectangle before and after. */
class Change {
  constructor(frame, width, before, after, area) {
    const [left, top, right, bottom] = area;
    Object.assign(this, { frame, width, left, top, right, bottom });
    this.before = this.cut(before);
    this.after = this.cut(after);
    this.bytes = 4 * this.before.length;
  }

  cut(labels) {
    const columns = this.right - this.left;
    const out = new Uint16Array(columns * (this.bottom - this.top));
    for (let y = this.top, i = 0; y < this.bottom; y++, i += columns) {
      out.set(labels.subarray(y * this.width + this.left, y * this.width + this.right), i);
    }
    return out;
  }

  apply(labels, values) {
    const columns = this.right - this.left;
    for (let y = this.top, i = 0; y < this.bottom; y++, i += columns) {
      labels.set(values.subarray(i, i + columns), y * this.width + this.left);
    }
    return [this.left, this.top, this.right, this.bottom];
  }
}

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.past = [];
    this.future = [];
  }

  add(step) {
    this.past.push(step);
    this.future = [];
    let bytes = this.past.reduce((sum, { bytes = 0 }) => sum + bytes, 0);
    while (this.past.length > UNDO_STEPS || (bytes > UNDO_BYTES && this.past.length > 1)) {
      bytes -= this.past.shift().bytes ?? 0;
    }
  }
}

export class Tools {
  /**
   * @param view the View
   * @param host frame(): number; object(): the id to draw, creating an object where there is none (a promise);
   *   changed(change): a label map was changed; propose(points, box): asks for a mask; accept(mask), say(text)
   */
  constructor(view, host) {
    this.view = view;
    this.host = host;
    this.tool = "brush";
    this.size = 16;
    this.cursor = null; // in the picture
    this.byKeys = false;
    this.reset();
    view.marks = (context, scale) => this.marks(context, scale);
  }

  choose(tool) {
    this.cancel();
    this.tool = tool;
    this.view.redraw();
  }

  /** Drop what is begun. Returns whether there was something. */
  cancel() {
    const begun = this.polygon.length > 0 || this.points.length > 0 || this.box !== null || this.stroke !== null;
    if (this.stroke) {
      this.view.labels.set(this.stroke.before);
      this.view.paint();
    }
    this.reset();
    this.view.setProposal(null);
    return begun;
  }

  reset() {
    this.stroke = null;
    this.polygon = [];
    this.points = []; // [x, y, on the object]
    this.box = null;
    this.dragged = false;
    this.mask = null;
  }

  async down(point, event = {}) {
    this.cursor = point;
    if (this.tool === "brush" || this.tool === "eraser") {
      this.pressed = true;
      const id = await this.host.object();
      if (!id || this.stroke) return;
      this.stroke = {
        id, any: event.shiftKey && this.tool === "eraser", before: this.view.labels.slice(), last: point,
        area: [Infinity, Infinity, -Infinity, -Infinity],
      };
      this.stamp(point);
      if (!this.pressed) this.up(); // released while the object was made
    } else if (this.tool === "polygon") {
      this.polygon.push([point.x, point.y]);
    } else if (this.tool === "box") {
      if (this.mask) { // a click mends the proposal of the box
        this.points.push([point.x, point.y, !event.shiftKey]);
        this.ask();
      } else {
        this.box = [point.x, point.y, point.x, point.y];
        this.dragged = true;
      }
    } else {
      this.points.push([point.x, point.y, !event.shiftKey]);
      this.ask();
    }
    this.view.redraw();
  }

  move(point) {
    this.cursor = point;
    if (this.stroke) this.stamp(point);
    if (this.dragged) this.box.splice(2, 2, point.x, point.y);
    this.view.redraw();
  }

  up() {
    this.pressed = false;
    if (this.stroke) {
      const { before, area } = this.stroke;
      this.stroke = null;
      this.commit(before, area);
    }
    if (this.dragged) {
      this.dragged = false;
      const [x0, y0, x1, y1] = this.box;
      if (Math.abs(x1 - x0) < 3 || Math.abs(y1 - y0) < 3) this.box = null;
      else this.ask();
    }
    this.view.redraw();
  }

  /** Close the polygon, or take the proposal. Returns whether there was one. */
  async accept() {
    if (this.tool === "polygon" && this.polygon.length > 2) {
      const polygon = this.polygon;
      const id = await this.host.object();
      this.reset();
      if (id) this.fill(polygon, id);
    } else if (this.mask) {
      const mask = this.mask;
      const id = await this.host.object();
      this.reset();
      this.view.setProposal(null);
      if (id) this.take((i) => mask[i], id);
    } else return false;
    this.view.redraw();
    return true;
  }

  /** Take back the last point. Returns whether there was one. */
  back() {
    if (this.polygon.pop()) this.view.redraw();
    else if (this.points.pop()) {
      if (this.box || this.points.some(([, , on]) => on)) this.ask();
      else this.cancel();
    } else return false;
    return true;
  }

  async ask() {
    const points = this.points.filter(([x, y]) => x >= 0 && y >= 0 && x < this.view.width && y < this.view.height);
    this.points = points;
    if (!this.box && !points.some(([, , on]) => on)) return;
    const mine = (this.question = {});
    const mask = await this.host.propose(points, this.box);
    if (mine !== this.question || !mask || (!this.points.length && !this.box)) return;
    this.mask = mask.includes(1) ? mask : null;
    this.view.setProposal(this.mask, "#ffd54a");
    this.host.say(this.mask ? "Enter takes the proposal, Esc drops it. A click mends it, Shift+click excludes."
      : "Nothing stands out there. Try a box, or draw.");
  }

  fill(polygon, id) {
    const xs = polygon.map(([x]) => x), ys = polygon.map(([, y]) => y);
    const { width, height } = this.view;
    const left = Math.max(0, Math.floor(Math.min(...xs))), top = Math.max(0, Math.floor(Math.min(...ys)));
    const right = Math.min(width, Math.ceil(Math.max(...xs)) + 1), bottom = Math.min(height, Math.ceil(Math.max(...ys)) + 1);
    if (right <= left || bottom <= top) return;
    const canvas = document.createElement("canvas");
    canvas.width = right - left;
    canvas.height = bottom - top;
    const context = canvas.getContext("2d");
    context.beginPath();
    for (const [x, y] of polygon) context.lineTo(x - left, y - top);
    context.fill();
    const alpha = context.getImageData(0, 0, canvas.width, canvas.height).data;
    this.take((i) => {
      const x = i % width - left, y = Math.floor(i / width) - top;
      return x >= 0 && y >= 0 && x < canvas.width && y < canvas.height && alpha[4 * (y * canvas.width + x) + 3] > 127;
    }, id);
  }

  /** Give an object every pixel of which `inside(index)` holds. */
  take(inside, id) {
    const { labels, width, height } = this.view;
    const before = labels.slice();
    const area = [width, height, 0, 0];
    for (let y = 0, i = 0; y < height; y++) {
      for (let x = 0; x < width; x++, i++) {
        if (inside(i) && labels[i] !== id) {
          labels[i] = id;
          grow(area, x, y, x + 1, y + 1);
        }
      }
    }
    this.commit(before, area);
  }

  commit(before, area) {
    if (area[2] <= area[0] || area[3] <= area[1]) return;
    this.view.paint(area);
    this.host.changed(new Change(this.host.frame(), this.view.width, before, this.view.labels, area));
  }

  /** Draw with the round brush from where it was to a point. */
  stamp(to) {
    const { labels, width, height } = this.view;
    const { id, any, last, area } = this.stroke;
    const erase = this.tool === "eraser", radius = this.size / 2;
    const touched = [Infinity, Infinity, -Infinity, -Infinity];
    const steps = Math.max(1, Math.ceil(Math.hypot(to.x - last.x, to.y - last.y) / Math.max(0.5, radius / 3)));
    for (let step = 0; step <= steps; step++) {
      const cx = last.x + (to.x - last.x) * step / steps, cy = last.y + (to.y - last.y) * step / steps;
      const y1 = Math.min(height - 1, Math.floor(cy + radius));
      for (let y = Math.max(0, Math.ceil(cy - radius - 0.5)); y <= y1; y++) {
        const half = Math.sqrt(Math.max(0, radius * radius - (y + 0.5 - cy) ** 2));
        const x0 = Math.max(0, Math.round(cx - half)), x1 = Math.min(width, Math.max(Math.round(cx + half), Math.floor(cx) + 1));
        for (let x = x0, i = y * width + x0; x < x1; x++, i++) {
          if (!erase) labels[i] = id;
          else if (any || labels[i] === id) labels[i] = 0;
        }
        if (x1 > x0) grow(touched, x0, y, x1, y + 1);
      }
    }
    this.stroke.last = to;
    if (touched[2] > touched[0]) {
      grow(area, ...touched);
      this.view.paint(touched);
    }
  }

  marks(context, scale) {
    const thin = 1 / scale;
    const stroke = (width = 1) => {
      context.lineWidth = (width + 2) * thin;
      context.strokeStyle = "#000a";
      context.stroke();
      context.lineWidth = width * thin;
      context.strokeStyle = "#fff";
      context.stroke();
    };
    if (this.polygon.length) {
      context.beginPath();
      for (const [x, y] of this.polygon) context.lineTo(x, y);
      if (this.cursor) context.lineTo(this.cursor.x, this.cursor.y);
      stroke(1.5);
      for (const [x, y] of this.polygon) {
        context.beginPath();
        context.rect(x - 3 * thin, y - 3 * thin, 6 * thin, 6 * thin);
        stroke();
      }
    }
    if (this.box) {
      const [x0, y0, x1, y1] = this.box;
      context.beginPath();
      context.rect(x0, y0, x1 - x0, y1 - y0);
      stroke(1.5);
    }
    for (const [x, y, on] of this.points) {
      context.beginPath();
      context.arc(x, y, 5 * thin, 0, 7);
      context.fillStyle = on ? "#59c26b" : "#e0584f";
      context.fill();
      stroke();
    }
    if (!this.cursor) return;
    const { x, y } = this.cursor;
    const round = this.tool === "brush" || this.tool === "eraser";
    if (round) {
      context.beginPath();
      context.arc(x, y, Math.max(this.size / 2, thin), 0, 7);
      stroke();
    }
    if (!round || this.byKeys) {
      const inner = 4 * thin, outer = 11 * thin;
      context.beginPath();
      for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
        context.moveTo(x + dx * inner, y + dy * inner);
        context.lineTo(x + dx * outer, y + dy * outer);
      }
      stroke();
    }
  }
}

function grow(area, left, top, right, bottom) {
  area[0] = Math.min(area[0], left);
  area[1] = Math.min(area[1], top);
  area[2] = Math.max(area[2], right);
  area[3] = Math.max(area[3], bottom);
}
