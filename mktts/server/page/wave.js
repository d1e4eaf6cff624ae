// Draws the audio as bars and highlights what has been played.
const PEAKS_PER_S = 100, BAR_PX = 4, GAP_PX = 1, LEAST_S = 3;

export class Wave {
  constructor(canvas) {
    this.canvas = canvas;
    this.clear(PEAKS_PER_S);
  }

  clear(rateHz) {
    this.peaks = [];
    this.size = Math.round(rateHz / PEAKS_PER_S); // samples per peak
    this.samples = 0;
    this.draw(0);
  }

  // samples: a Float32Array.
  push(samples) {
    for (const sample of samples) {
      const peak = Math.floor(this.samples++ / this.size);
      this.peaks[peak] = Math.max(this.peaks[peak] ?? 0, Math.abs(sample));
    }
  }

  draw(heard_s) {
    const { canvas, peaks } = this;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = canvas.clientHeight * devicePixelRatio;
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.fillStyle = getComputedStyle(canvas).color;
    const bars = Math.floor(canvas.clientWidth / BAR_PX);
    const loudest = Math.max(0.3, ...peaks);
    const perBar = Math.max(peaks.length, LEAST_S * PEAKS_PER_S) / bars;
    for (let bar = 0; bar < bars; bar++) {
      const peak = Math.max(0, ...peaks.slice(Math.floor(bar * perBar), Math.ceil((bar + 1) * perBar)));
      const height = Math.max(2, (0.9 * canvas.clientHeight * peak) / loudest);
      pen.globalAlpha = peak && bar * perBar < heard_s * PEAKS_PER_S ? 1 : 0.3;
      pen.fillRect(bar * BAR_PX, (canvas.clientHeight - height) / 2, BAR_PX - GAP_PX, height);
    }
  }
}
