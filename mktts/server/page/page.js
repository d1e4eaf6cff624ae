// The page to try a server: its voices, one request at a time with its latency, and code examples for other programs.
import { EXAMPLES } from "./examples.js";
import { openPlayer } from "./playing.js";
import { recordings } from "./recording.js";
import { Wave } from "./wave.js";

const SAMPLE = "Hello. This is how I sound.";
const DEFAULT = "default";
const $ = (id) => document.getElementById(id);
const recording = recordings({ file: $("file"), record: $("record"), drop: $("drop"), status: $("recording") });
const wave = new Wave($("wave"));
const kept = new Set(); // voices that this visitor has uploaded
let health = null;
let running = null; // { stop, heard_s } of the utterance that is being generated or played
let shown = "curl"; // name of the example on show

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// An event handler that runs `work` and shows its error.
const tried = (work) => async (event) => {
  try {
    problem("");
    await work(event);
  } catch (error) {
    problem(error.message);
  }
};

// The response; throws an Error whose message can be shown to the user.
async function ask(path, settings = {}) {
  const headers = { ...settings.headers };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch(path, { ...settings, headers });
  if (response.ok || path === "health") return response;
  if (response.status === 401) $("key-row").hidden = false;
  const id = response.headers.get("X-Request-Id");
  const told = await response.json().catch(() => null); // without JSON only the status is known
  const message = told?.error.message ?? `HTTP ${response.status}`;
  throw new Error(id ? `${message} (request ${id})` : message);
}

// ---- model and voices of the server

async function load() {
  health = await (await ask("health")).json();
  const { model, backend, device, sample_rate_hz, streams_max } = health;
  const place = `${backend} on ${device}, ${sample_rate_hz / 1000} kHz`;
  $("facts").textContent = `${model.checkpoint}, ${place}, up to ${streams_max} listeners at once`;
  $("noise").hidden = !model.random_weights;
  $("reference").hidden = !model.clones;
  $("instructions-row").hidden = !health.takes_instructions;
  $("language").replaceChildren(...health.languages.map((name) => new Option(name, name)));
  await loadVoices();
}

const chosen = () => new FormData($("form")).get("voice") ?? DEFAULT;

async function loadVoices(wanted = chosen()) {
  const found = await (await ask("v1/audio/voices")).json();
  kept.clear();
  for (const { name } of found.uploaded_voices) kept.add(name);
  const names = [DEFAULT, ...found.voices];
  $("voices").replaceChildren(...names.map((name) => voiceButton(name, name === wanted)));
  $("keep-row").hidden = !found.uploads;
  choose();
}

function voiceButton(name, checked) {
  const radio = Object.assign(document.createElement("input"), { type: "radio", name: "voice", value: name, checked });
  const label = document.createElement("label");
  label.append(radio, kept.has(name) ? `${name} (yours)` : name);
  const sample = Object.assign(document.createElement("button"), { type: "button", textContent: "▶" });
  sample.ariaLabel = `Hear ${name}`;
  sample.onclick = tried(() => say({ input: SAMPLE, voice: name }));
  const both = document.createElement("span");
  both.append(label, sample);
  return both;
}

function choose() {
  $("delete").disabled = !kept.has(chosen());
  showExample();
}

// ---- uploaded voices

async function keep() {
  if (!recording.blob()) throw new Error("There is no recording yet: choose a file, or record one.");
  const form = new FormData();
  form.set("name", $("name").value);
  form.set("consent", $("consent").value);
  if ($("said").value) form.set("ref_text", $("said").value);
  form.set("audio_sample", recording.blob(), "recording");
  const { name } = await (await ask("v1/audio/voices", { method: "POST", body: form })).json();
  $("drop").click();
  await loadVoices(name);
}

async function remove() {
  await ask(`v1/audio/voices/${encodeURIComponent(chosen())}`, { method: "DELETE" });
  await loadVoices(DEFAULT);
}

// ---- one utterance

async function speak(event) {
  event.preventDefault();
  if (running) return running.stop();
  const wishes = { input: $("text").value, language: $("language").value };
  if (Number($("speed").value) !== 1) wishes.speed = Number($("speed").value);
  if ($("seed").value) wishes.seed = Number($("seed").value);
  if (!$("instructions-row").hidden && $("instructions").value) wishes.instructions = $("instructions").value;
  if (!$("reference").hidden && recording.blob()) {
    wishes.ref_audio = await recording.dataUrl();
    if ($("said").value) wishes.ref_text = $("said").value;
  } else wishes.voice = chosen();
  await say(wishes);
}

const ms = (value) => (value === null ? "–" : `${Math.round(value)} ms`);

function show(player, firstByte_ms) {
  const { firstSound_ms, late_ms, gaps, sound_s } = player.report();
  $("first-byte").textContent = ms(firstByte_ms);
  $("first-sound").textContent = ms(firstSound_ms);
  $("late").textContent = firstSound_ms === null ? "–" : gaps ? `${ms(late_ms)} in ${gaps}` : "0 ms";
  $("sound").textContent = `${sound_s.toFixed(2)} s`;
}

function follow() {
  wave.draw(running ? running.heard_s() : $("player").currentTime || Infinity);
  if (running || !$("player").paused) requestAnimationFrame(follow);
}

async function say(wishes) {
  running?.stop();
  const begun_ms = performance.now();
  const abort = new AbortController();
  const player = openPlayer(health.sample_rate_hz, begun_ms);
  const stop = () => {
    abort.abort();
    player.stop();
    if (running !== mine) return;
    running = null;
    $("speak").textContent = "Speak";
  };
  const mine = { stop, heard_s: player.heard_s };
  $("player").pause();
  wave.clear(health.sample_rate_hz);
  running = mine;
  follow();
  $("speak").textContent = "Stop";
  $("download").hidden = $("player").hidden = true;
  $("drawn").textContent = "";
  for (const id of ["first-byte", "first-sound", "late", "sound", "made"]) $(id).textContent = "–";
  let firstByte_ms = null;
  try {
    const body = JSON.stringify({ ...wishes, response_format: "wav" });
    const headers = { "Content-Type": "application/json" };
    const response = await ask("v1/audio/speech", { method: "POST", headers, body, signal: abort.signal });
    $("drawn").textContent = `seed ${response.headers.get("X-Seed")}`;
    const pieces = [];
    for (const reader = response.body.getReader(); ; ) {
      const { done, value: bytes } = await reader.read();
      if (done) break;
      firstByte_ms ??= performance.now() - begun_ms;
      pieces.push(bytes);
      wave.push(player.push(bytes));
      show(player, firstByte_ms);
    }
    $("made").textContent = ms(performance.now() - begun_ms);
    await offer(pieces);
    await player.end();
  } catch (error) {
    if (!abort.signal.aborted) throw error;
  } finally {
    stop();
  }
}

// Offers the complete WAV for replay and download, with the lengths that the header of a streamed WAV lacks.
async function offer(pieces) {
  const wav = new DataView(await new Blob(pieces).arrayBuffer());
  wav.setUint32(4, wav.byteLength - 8, true);
  wav.setUint32(40, wav.byteLength - 44, true);
  URL.revokeObjectURL($("download").href);
  $("player").src = $("download").href = URL.createObjectURL(new Blob([wav], { type: "audio/wav" }));
  $("download").download = "speech.wav";
  $("download").hidden = $("player").hidden = false;
}

// ---- code examples for other programs

function showExample() {
  const voice = chosen() === DEFAULT ? null : chosen();
  const url = new URL(".", location.href).href.slice(0, -1);
  $("code").textContent = EXAMPLES[shown]({ url, voice, text: $("text").value, locked: !$("key-row").hidden });
  for (const tab of $("tablist").children) tab.ariaSelected = tab.textContent === shown;
}

for (const name of Object.keys(EXAMPLES)) {
  const tab = Object.assign(document.createElement("button"), { type: "button", role: "tab", textContent: name });
  tab.onclick = () => showExample((shown = name));
  $("tablist").append(tab);
}

function copy() {
  getSelection().selectAllChildren($("code"));
  document.execCommand("copy"); // navigator.clipboard works on https and localhost only
  $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 1_500);
}

$("form").onsubmit = tried(speak);
// The browser shows an invalid field's message beside it, so a collapsed section must be opened first.
$("form").addEventListener("invalid", ({ target }) => ((target.closest("details") ?? {}).open = true), true);
$("keep").onclick = tried(keep);
$("delete").onclick = tried(remove);
$("voices").onchange = choose;
$("text").oninput = showExample;
$("copy").onclick = copy;
$("key").onchange = tried(load);
$("player").onplay = () => follow(running?.stop());
$("player").onseeked = onresize = follow;
addEventListener("pagehide", () => running?.stop());
tried(load)();
