// The strip of frames: which have masks, which were drawn, where the run is and what is shown.

export class Timeline {
  constructor(canvas, go) {
    this.canvas = canvas;
    this.length = 1;
    this.frame = 0;
    this.labelled = [];
    this.marked = [];
    this.running = null;
    const at = (event) => {
      const area = canvas.getBoundingClientRect();
      go(Math.min(this.length - 1, Math.max(0, Math.floor((event.clientX - area.left) / area.width * this.length))));
    };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); at(event); });
    canvas.addEventListener("pointermove", (event) => { if (canvas.hasPointerCapture(event.pointerId)) at(event); });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  set(values) {
    Object.assign(this, values);
    this.canvas.setAttribute("aria-valuemax", this.length - 1);
    this.canvas.setAttribute("aria-valuenow", this.frame);
    this.draw();
  }

  draw() {
    const { canvas, length } = this;
    const ratio = devicePixelRatio, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.max(1, Math.round(height * ratio));
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const place = (frame) => frame / length * width, wide = Math.max(2, width / length);
    context.fillStyle = "#26292e";
    context.fillRect(0, 12, width, height - 12);
    context.fillStyle = "#3d6a92";
    for (const [first, last] of this.labelled) context.fillRect(place(first), 12, Math.max(2, place(last + 1) - place(first)), height - 12);
    context.fillStyle = "#f0c04c";
    for (const frame of this.marked) context.fillRect(place(frame), height - 5, wide, 5);
    if (this.running !== null) {
      context.fillStyle = "#9fd0ff";
      context.fillRect(place(this.running), 12, wide, height - 12);
    }
    context.fillStyle = "#8a9099";
    context.font = "9px system-ui, sans-serif";
    context.textBaseline = "top";
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000]
      .find((value) => value / length * width > 44) ?? length;
    for (let frame = 0; frame < length; frame += step) {
      context.fillRect(Math.round(place(frame)), 9, 1, 3);
      if (place(frame) < width - 24) context.fillText(frame, Math.round(place(frame)) + 3, 0);
    }
    const x = place(this.frame + 0.5);
    context.fillStyle = "#fff";
    context.fillRect(Math.round(x) - 1, 8, 2, height - 8);
    context.beginPath();
    context.moveTo(x - 5, 4);
    context.lineTo(x + 5, 4);
    context.lineTo(x, 11);
    context.fill();
  }
}
