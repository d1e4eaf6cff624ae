// Checks the page's pure audio code: what is heard at another rate, and what is played when.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(process.argv[2] + "/");
const load = (name) => import(new URL(name, folder));
const { Resampler } = await load("resample.js");
const { PlayQueue } = await load("queue.js");

// ---- resample.js
const tone = (hz, rate, seconds) => Float32Array.from({ length: rate * seconds }, (_, i) => Math.sin((2 * Math.PI * hz * i) / rate));

function convert(input, from, to, block) {
  const resampler = new Resampler(from, to), pieces = [];
  for (let i = 0; i < input.length; i += block) pieces.push(...resampler.push(input.subarray(i, i + block)));
  return pieces;
}

// amplitude at `hz`, from the second quarter on, so that the filter's start plays no part
function amplitude(samples, hz, rate) {
  let re = 0, im = 0, n = 0;
  for (let i = Math.floor(samples.length / 4); i < samples.length; i++, n++) {
    re += samples[i] * Math.cos((2 * Math.PI * hz * i) / rate);
    im += samples[i] * Math.sin((2 * Math.PI * hz * i) / rate);
  }
  return (2 * Math.hypot(re, im)) / n;
}

for (const from of [48000, 44100, 16000, 8000, 96000]) {
  const heard = convert(tone(1000, from, 1), from, 16000, 128);
  assert.ok(Math.abs(heard.length - 16000) <= 40, `${from}: ${heard.length} samples of one second`);
  assert.ok(Math.abs(amplitude(heard, 1000, 16000) - 1) < 0.01, `${from}: the tone's level`);
}
const aliased = convert(tone(10000, 48000, 1), 48000, 16000, 128);
assert.ok(amplitude(aliased, 6000, 16000) < 0.003, "10 kHz would come back as 6 kHz");
assert.deepEqual(convert(tone(300, 44100, 1), 44100, 16000, 128), convert(tone(300, 44100, 1), 44100, 16000, 1000), "blocks leave no trace");
const constant = convert(new Float32Array(4800).fill(0.5), 48000, 16000, 128);
assert.ok(constant.slice(40).every((value) => Math.abs(value - 0.5) < 1e-4), "a constant stays one");

// ---- queue.js, one sample per millisecond
const RATE = 1000;
const pull = (queue, samples) => { const out = new Float32Array(samples).fill(9); queue.pull(out); return Array.from(out); };
const silent = (samples) => samples.every((value) => value === 0);
const half = (length) => new Int16Array(length).fill(16384);

let queue = new PlayQueue(RATE);
queue.push(half(40));
assert.ok(silent(pull(queue, 10)), "it waits for its lead");
queue.push(half(40));
assert.deepEqual(pull(queue, 80), new Array(80).fill(0.5), "then plays everything in order");
assert.ok(silent(pull(queue, 10)));

queue = new PlayQueue(RATE);
queue.push(half(20)); // shorter than the lead and nothing follows
let heard = [];
for (let i = 0; i < 12; i++) heard.push(...pull(queue, 10));
assert.equal(heard.filter((value) => value === 0.5).length, 20, "a short piece is played all the same");
assert.equal(queue.underruns, 0);

queue = new PlayQueue(RATE);
queue.push(half(100));
pull(queue, 150); // dry for 50 ms
queue.push(half(100));
assert.equal(queue.underruns, 1, "a late piece is a gap");
assert.ok(queue.lead > 60, "and makes the next start later");
pull(queue, 100);
pull(queue, 500);
queue.push(half(10));
assert.equal(queue.underruns, 1, "a pause between utterances is none");

queue = new PlayQueue(RATE);
queue.push(half(1000));
pull(queue, 100);
queue.clear();
heard = pull(queue, 100);
assert.ok(heard[0] > 0 && heard[0] < 0.5 && silent(heard.slice(5)), "clear fades within 5 ms and drops the rest");
assert.equal(queue.dropped, 895);
queue.push(half(100));
assert.equal(queue.underruns, 0, "what comes after clear is new, not late");
assert.equal(pull(queue, 100).filter((value) => value === 0.5).length, 100);

queue = new PlayQueue(RATE);
queue.push(half(30));
queue.clear();
assert.ok(silent(pull(queue, 200)), "what had not begun to sound never does");

queue = new PlayQueue(RATE);
queue.push(half(31 * RATE));
assert.equal(queue.dropped, 1000, "memory is bounded");
