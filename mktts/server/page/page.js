// The page to try a server: what it offers, one request at a time, and what that took.
import { openPlayer } from "./playing.js";
import { recordings } from "./recording.js";

const $ = (id) => document.getElementById(id);
const recording = recordings({ file: $("file"), record: $("record"), drop: $("drop"), status: $("recording") });
const kept = new Set(); // voices that this visitor has uploaded
let health = null;
let running = null; // { stop } of the speech that is being made

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function ask(path, settings = {}) {
  const headers = { ...settings.headers };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  return fetch(path, { ...settings, headers });
}

// The answer, or an Error whose message is for the reader.
async function checked(response) {
  if (response.ok) return response;
  if (response.status === 401) $("key-row").hidden = false;
  const id = response.headers.get("X-Request-Id");
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: the status says what there is to say
  }
  throw new Error(id ? `${message} (request ${id})` : message);
}

// ---- what the server offers

async function load() {
  try {
    health = await (await ask("health")).json();
    const { model, backend, device, sample_rate_hz } = health;
    $("facts").textContent = `${model.checkpoint}, ${backend} on ${device}, ${sample_rate_hz / 1000} kHz`;
    $("noise").hidden = !model.random_weights;
    $("reference").hidden = !model.clones;
    $("instructions-row").hidden = !health.takes_instructions;
    $("language").replaceChildren(...health.languages.map((name) => new Option(name, name)));
    await loadVoices();
    problem("");
  } catch (error) {
    problem(error.message);
  }
}

async function loadVoices(chosen = $("voice").value) {
  const found = await (await checked(await ask("v1/audio/voices"))).json();
  kept.clear();
  for (const { name } of found.uploaded_voices) kept.add(name);
  const options = ["default", ...found.voices].map((name) => new Option(kept.has(name) ? `${name} (yours)` : name, name));
  $("voice").replaceChildren(...options);
  if ([...$("voice").options].some(({ value }) => value === chosen)) $("voice").value = chosen;
  $("keep-row").hidden = !found.uploads;
  choose();
}

function choose() {
  $("delete").disabled = !kept.has($("voice").value);
}

// ---- a voice of the visitor's own

async function keep() {
  try {
    if (!recording.blob()) throw new Error("There is no recording yet: choose a file, or record one.");
    const form = new FormData();
    form.set("name", $("name").value);
    form.set("consent", $("consent").value);
    if ($("said").value) form.set("ref_text", $("said").value);
    form.set("audio_sample", recording.blob(), "recording");
    const { name } = await (await checked(await ask("v1/audio/voices", { method: "POST", body: form }))).json();
    $("drop").click();
    await loadVoices(name);
    problem("");
  } catch (error) {
    problem(error.message);
  }
}

async function remove() {
  try {
    await checked(await ask(`v1/audio/voices/${encodeURIComponent($("voice").value)}`, { method: "DELETE" }));
    await loadVoices("default");
    problem("");
  } catch (error) {
    problem(error.message);
  }
}

// ---- one utterance

async function body() {
  const wishes = { input: $("text").value, response_format: $("format").value, language: $("language").value };
  if (Number($("speed").value) !== 1) wishes.speed = Number($("speed").value);
  if ($("seed").value) wishes.seed = Number($("seed").value);
  if (!$("instructions-row").hidden && $("instructions").value) wishes.instructions = $("instructions").value;
  if (!$("reference").hidden && recording.blob()) {
    wishes.ref_audio = await recording.dataUrl();
    if ($("said").value) wishes.ref_text = $("said").value;
  } else wishes.voice = $("voice").value;
  return wishes;
}

const ms = (value) => (value === null ? "–" : `${Math.round(value)} ms`);

function show(player, firstByte_ms) {
  const { firstSound_ms, late_ms, gaps, sound_s } = player.report();
  $("first-byte").textContent = ms(firstByte_ms);
  $("first-sound").textContent = ms(firstSound_ms);
  $("late").textContent = firstSound_ms === null ? "–" : gaps ? `${ms(late_ms)} in ${gaps}` : "0 ms";
  $("sound").textContent = sound_s === null ? "–" : `${sound_s.toFixed(2)} s`;
}

function busy(mine) {
  running = mine;
  // A disabled button keeps the focus until the page is drawn again, and nobody has it then.
  const nobodys = [document.body, $("stop")].includes(document.activeElement);
  $("speak").disabled = Boolean(mine);
  $("stop").disabled = !mine;
  if (!mine && nobodys) $("speak").focus();
}

async function speak(event) {
  event.preventDefault();
  const begun_ms = performance.now();
  const format = $("format").value;
  const abort = new AbortController();
  const player = openPlayer(format, health.sample_rate_hz, begun_ms, $("player"));
  const mine = { stop: () => (abort.abort(), player.stop()) };
  busy(mine);
  $("stop").focus();
  problem("");
  $("download").hidden = true;
  $("player").hidden = format === "wav";
  for (const id of ["first-byte", "first-sound", "late", "sound", "made", "drawn"]) $(id).textContent = "–";
  let firstByte_ms = null;
  try {
    const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(await body()) };
    const response = await checked(await ask("v1/audio/speech", { ...request, signal: abort.signal }));
    $("drawn").textContent = response.headers.get("X-Seed");
    const pieces = [];
    for (const reader = response.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      firstByte_ms ??= performance.now() - begun_ms;
      pieces.push(value);
      player.push(value);
      show(player, firstByte_ms);
    }
    $("made").textContent = ms(performance.now() - begun_ms);
    offer(new Blob(pieces, { type: response.headers.get("Content-Type") }), format);
    await player.end();
  } catch (error) {
    player.stop();
    if (!abort.signal.aborted) problem(error.message);
  }
  show(player, firstByte_ms);
  if (running === mine) busy(null);
}

function offer(blob, format) {
  if ($("download").href) URL.revokeObjectURL($("download").href);
  $("download").href = URL.createObjectURL(blob);
  $("download").download = `speech.${format}`;
  $("download").hidden = false;
}

$("form").onsubmit = speak;
$("stop").onclick = () => running?.stop();
$("keep").onclick = keep;
$("delete").onclick = remove;
$("voice").onchange = choose;
$("key").onchange = load;
addEventListener("pagehide", () => running?.stop());
load();
