// What the canvas shows: the frame, its masks in one of four ways, and what the tool in hand draws on top.

const GAP = 12; // between the two pictures of "side by side", in their pixels

export class View {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.overlay = document.createElement("canvas");
    this.frame = null;
    this.labels = null;
    this.width = this.height = 1;
    this.objects = [];
    this.chosen = 0;
    this.mode = "overlay";
    this.opacity = 0.45;
    this.backdrop = "#ffffff";
    this.scale = 1;
    this.left = this.top = 0;
    this.fitted = true;
    this.proposal = null;
    this.marks = () => {}; // draws what the tool shows: (context, scale)
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  /** Show another video's size. */
  begin(width, height) {
    Object.assign(this, { width, height, frame: null, labels: new Uint16Array(width * height), proposal: null });
    this.overlay.width = width;
    this.overlay.height = height;
    this.pixels = this.overlay.getContext("2d").createImageData(width, height);
    this.fit();
  }

  show(frame, labels) {
    this.frame = frame;
    this.labels = labels;
    this.paint();
  }

  setObjects(objects) {
    this.objects = objects;
    this.paint();
  }

  setProposal(mask, color) {
    this.proposal = mask && { canvas: stencil(mask, this.width, this.height, color) };
    this.redraw();
  }

  setMode(mode) {
    const wasSide = this.mode === "side";
    this.mode = mode;
    if (this.fitted || wasSide !== (mode === "side")) this.fit();
    this.paint();
  }

  /** Colour the pixels of `area` (left, top, right, bottom; the whole picture without) by their object. */
  paint(area = [0, 0, this.width, this.height]) {
    if (!this.pixels) return;
    const { width, height, labels } = this;
    const [tint, line, plain] = this.tables();
    const out = new Uint32Array(this.pixels.data.buffer);
    const reach = Math.max(1, Math.round(Math.max(width, height) / 900));
    const [x0, y0, x1, y1] = [Math.max(0, area[0] - reach), Math.max(0, area[1] - reach),
      Math.min(width, area[2] + reach), Math.min(height, area[3] + reach)];
    if (x1 <= x0 || y1 <= y0) return;
    const down = reach * width;
    for (let y = y0; y < y1; y++) {
      const edgeRow = y < reach || y >= height - reach;
      for (let x = x0, i = y * width + x0; x < x1; x++, i++) {
        const id = labels[i];
        if (id === 0) { out[i] = plain; continue; }
        const edge = edgeRow || x < reach || x >= width - reach ||
          labels[i - reach] !== id || labels[i + reach] !== id || labels[i - down] !== id || labels[i + down] !== id;
        out[i] = edge ? line[id] : tint[id];
      }
    }
    this.overlay.getContext("2d").putImageData(this.pixels, 0, 0, x0, y0, x1 - x0, y1 - y0);
    this.redraw();
  }

  /** Colours by id: inside, at the outline, and that of the background. */
  tables() {
    const tint = new Uint32Array(65536), line = new Uint32Array(65536);
    const alpha = Math.round(255 * (this.mode === "outline" ? 0 : this.opacity));
    const plain = this.mode === "cutout" ? packed(this.backdrop, 255) : 0;
    for (const { id, color, hidden } of this.objects) {
      if (this.mode === "cutout") {
        tint[id] = line[id] = hidden ? plain : 0;
      } else if (!hidden) {
        tint[id] = packed(color, alpha);
        line[id] = packed(color, 255);
      }
    }
    return [tint, line, plain];
  }

  redraw() {
    if (!this.waiting) this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  draw() {
    const { context, canvas, width, height } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!this.frame) return;
    const ratio = devicePixelRatio;
    context.setTransform(this.scale * ratio, 0, 0, this.scale * ratio, this.left * ratio, this.top * ratio);
    context.imageSmoothingEnabled = this.scale < 3;
    context.imageSmoothingQuality = "high";
    const side = this.mode === "side";
    context.drawImage(this.frame, 0, 0, width, height);
    if (side) {
      context.translate(width + GAP, 0);
      context.drawImage(this.frame, 0, 0, width, height);
    }
    context.drawImage(this.overlay, 0, 0);
    if (this.proposal) context.drawImage(this.proposal.canvas, 0, 0);
    if (side) {
      context.translate(-width - GAP, 0);
      this.marks(context, this.scale);
      context.translate(width + GAP, 0);
    }
    this.marks(context, this.scale);
  }

  /** Where in the picture a point of the window lies. */
  locate(event) {
    const area = this.canvas.getBoundingClientRect();
    let x = (event.clientX - area.left - this.left) / this.scale;
    const y = (event.clientY - area.top - this.top) / this.scale;
    if (this.mode === "side" && x > this.width + GAP / 2) x -= this.width + GAP;
    return { x, y };
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    this.canvas.width = Math.max(1, Math.round(clientWidth * devicePixelRatio));
    this.canvas.height = Math.max(1, Math.round(clientHeight * devicePixelRatio));
    if (this.fitted) this.fit();
    this.draw();
  }

  fit() {
    const { clientWidth, clientHeight } = this.canvas;
    const width = this.mode === "side" ? 2 * this.width + GAP : this.width;
    this.scale = Math.max(0.01, Math.min((clientWidth - 16) / width, (clientHeight - 16) / this.height));
    this.left = (clientWidth - width * this.scale) / 2;
    this.top = (clientHeight - this.height * this.scale) / 2;
    this.fitted = true;
    this.redraw();
  }

  /** Zoom by a factor around a point of the canvas, its middle without one. */
  zoom(factor, at = { x: this.canvas.clientWidth / 2, y: this.canvas.clientHeight / 2 }) {
    const scale = Math.min(64, Math.max(0.05, this.scale * factor));
    this.left = at.x - (at.x - this.left) * scale / this.scale;
    this.top = at.y - (at.y - this.top) * scale / this.scale;
    this.scale = scale;
    this.fitted = false;
    this.redraw();
  }

  pan(dx, dy) {
    this.left += dx;
    this.top += dy;
    this.fitted = false;
    this.redraw();
  }

  /** Move the picture so that a point of it can be seen. */
  reveal({ x, y }) {
    if (this.fitted) return;
    const margin = 40, shownX = x * this.scale + this.left, shownY = y * this.scale + this.top;
    const inside = (value, most) => Math.min(Math.max(value, margin), Math.max(margin, most - margin)) - value;
    this.pan(inside(shownX, this.canvas.clientWidth), inside(shownY, this.canvas.clientHeight));
  }
}

/** #rrggbb as a pixel of ImageData, read as little endian. */
function packed(color, alpha) {
  const value = parseInt(color.slice(1), 16);
  return ((alpha << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

/** A proposed mask as a picture: hatched, so that it is seen over every tint. */
function stencil(mask, width, height, color) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), pixels = context.createImageData(width, height);
  const out = new Uint32Array(pixels.data.buffer), strong = packed(color, 200), weak = packed("#ffffff", 90);
  const period = Math.max(6, Math.round(Math.max(width, height) / 110));
  for (let y = 0, i = 0; y < height; y++) {
    for (let x = 0; x < width; x++, i++) {
      if (!mask[i]) continue;
      const edge = x === 0 || y === 0 || x === width - 1 || y === height - 1 ||
        !mask[i - 1] || !mask[i + 1] || !mask[i - width] || !mask[i + width];
      out[i] = edge ? packed("#ffffff", 255) : (x + y) % period < period / 2 ? strong : weak;
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}
