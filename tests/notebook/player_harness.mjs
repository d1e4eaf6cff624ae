// Runs player.js against a fake AudioContext with a clock that the test moves by hand.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const RATE = 1000;
const started = [];
let closed = false, resumed = 0;

globalThis.AudioContext = class {
  constructor(options) { this.sampleRate = options.sampleRate; this.currentTime = 0; this.state = "running"; globalThis.clock = this; }
  createBuffer(channels, length, rate) {
    assert.equal(channels, 1);
    const data = new Float32Array(length);
    return { duration: length / rate, data, copyToChannel: (source) => data.set(source) };
  }
  resume() { resumed += 1; this.state = "running"; }
  close() { closed = true; }
};
globalThis.AudioBufferSourceNode = class {
  constructor(context, { buffer }) { this.buffer = buffer; }
  connect() {}
  start(at) { started.push({ at, node: this, duration: this.buffer.duration }); }
  stop() { this.stopped = true; }
  finish() { this.onended(); }
};
const listeners = new Set();
globalThis.document = { addEventListener: (kind) => listeners.add(kind), removeEventListener: (kind) => listeners.delete(kind) };

let tick = null;
globalThis.setInterval = (call) => { tick = call; return 1; };
globalThis.clearInterval = () => { tick = null; };
const values = { sample_rate_hz: RATE, stop_requested: false }, handlers = {}, reports = [];
const model = {
  get: (name) => values[name],
  on: (name, handler) => { handlers[name] = handler; },
  set: (name, value) => { values[name] = value; },
  save_changes: () => {},
  send: (message) => reports.push(message),
};
const source = readFileSync(process.argv[2], "utf8");
const player = (await import("data:text/javascript," + encodeURIComponent(source))).default;
const dispose = player.initialize({ model });

function pcm(samples, offset = 1) { // an odd byte offset: what arrives is not aligned to two bytes
  const bytes = new DataView(new ArrayBuffer(offset + 2 * samples.length), offset);
  samples.forEach((value, i) => bytes.setInt16(2 * i, value, true));
  return bytes;
}
const message = (kind, ...buffers) => handlers["msg:custom"]({ kind }, buffers);
const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-9, `${a} is not ${b}`);

// three chunks that arrive early play back to back, without a gap
message("begin");
clock.currentTime = 1;
message("pcm", pcm(new Array(100).fill(16384)));
assert.match(values.status, /^playing: 1 chunk, 0\.0 of 0\.1 s heard, 0 gaps, first sound \d+ ms after arrival$/);
message("pcm", pcm(new Array(100).fill(-32768)));
clock.currentTime = 1.1;
message("pcm", pcm(new Array(50).fill(0)));
close(started[1].at, started[0].at + 0.1);
close(started[2].at, started[1].at + 0.1);
assert.ok(started[0].at >= 1);
assert.equal(started[0].node.buffer.data[0], 0.5);
assert.equal(started[1].node.buffer.data[0], -1);
assert.deepEqual([reports[0].kind, reports[0].chunks], ["first", 1]);
assert.ok(reports[0].first_sound_ms < 20);

// the line counts chunks and seconds up while it plays, and stops when all was heard
tick();
assert.match(values.status, /^playing: 3 chunks, 0\.1 of 0\.3 s heard/);
clock.currentTime = 1.2;
tick();
assert.match(values.status, /^playing: 3 chunks, 0\.2 of 0\.3 s heard/);

// a chunk that arrives after playback ran dry is one gap and plays at once
clock.currentTime = 2;
message("pcm", pcm(new Array(100).fill(1)));
assert.ok(started[3].at >= 2 && started[3].at < 2.05);
message("end");
assert.deepEqual([reports.at(-1).kind, reports.at(-1).chunks, reports.at(-1).gaps], ["made", 4, 1]);

// "played" is said when the last sound is over, not when the last chunk came
const told = reports.length;
started.slice(0, 3).forEach(({ node }) => node.finish());
assert.equal(reports.length, told);
started[3].node.finish();
assert.deepEqual([reports.length, reports.at(-1).kind, tick], [told + 1, "played", null]);
assert.match(values.status, /^played: 4 chunks, .* 1 gap, /);

// Stop silences what is queued and ignores what still arrives
message("begin");
message("pcm", pcm(new Array(100).fill(1)));
values.stop_requested = true;
handlers["change:stop_requested"]();
assert.ok(started[4].node.stopped);
started[4].node.finish();
message("pcm", pcm([1, 2, 3]));
message("end");
assert.equal(started.length, 5);
assert.equal(reports.at(-1).kind, "stopped");

// the next utterance starts with fresh counters, and a gap between utterances is none
values.stop_requested = false;
clock.state = "suspended";
clock.currentTime = 9;
message("begin");
assert.equal(resumed, 1);
message("pcm", pcm([1, 2, 3]));
message("end");
assert.deepEqual([reports.at(-1).chunks, reports.at(-1).gaps], [1, 0]);

dispose();
assert.ok(closed && listeners.size === 0);
