// Checks the page's pure code: when pieces are played and how late they were, and samples out of a WAV in pieces.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const { Timeline, WavReader } = await import(new URL("timeline.js", pathToFileURL(process.argv[2] + "/")));
const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-9, `${a} is not ${b}`);

// ---- pieces that come in time follow each other without a gap
let line = new Timeline(0.05);
close(line.place(1.0, 0.08), 1.05);
close(line.place(1.01, 0.08), 1.13);
close(line.place(1.2, 0.1), 1.21);
close(line.sound, 0.26);
assert.equal(line.gaps, 0);
close(line.late, 0);
close(line.first, 1.05);

// ---- one that comes after the one before has ended is late by that much, and is played at once
close(line.place(1.5, 0.08), 1.5);
assert.equal(line.gaps, 1);
close(line.late, 1.5 - 1.31);
close(line.place(1.52, 0.08), 1.58);

// ---- samples, however the bytes are cut
const bytes = new Uint8Array(44 + 2 * 500).map((_, i) => (i * 37) % 256);
const whole = new WavReader().push(bytes);
assert.equal(whole.length, 500);
const view = new DataView(bytes.buffer);
whole.forEach((value, i) => close(value, view.getInt16(44 + 2 * i, true) / 32768));
for (const size of [1, 3, 43, 44, 45, 101, 1000]) {
  const reader = new WavReader();
  const found = [];
  for (let i = 0; i < bytes.length; i += size) found.push(...reader.push(bytes.slice(i, i + size)));
  assert.deepEqual(found, Array.from(whole), `pieces of ${size}`);
}
