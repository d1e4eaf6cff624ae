// The page's main module: controls and state of one conversation at a time, and the messages between its parts.
import { captions } from "./captions.js";
import { CAN_CHOOSE_SPEAKER, devicePickers } from "./devices.js";
import { latency } from "./latency.js";
import { eventLog } from "./log.js";
import { openMicrophone, outOfReach } from "./microphone.js";
import { openSocket } from "./socket.js";
import { openSpeaker } from "./speaker.js";
import { openPeer } from "./webrtc.js";

const $ = (id) => document.getElementById(id);
const lines = captions($("captions"));
const times = latency($("tiles"), $("turns"));
const log = eventLog($("log"));
const TRANSPORT_NAMES = { websocket: "WebSocket", webrtc: "WebRTC" };
const NO_KEY = "it needs a key, and this page's address has no ?key=KEY or a wrong one";
const REFUSALS = { 401: NO_KEY, 403: NO_KEY };
const LLM_MS = 15_000; // after this time without an answer, a problem of the language model is shown
const RETRY_MS = [500, 1_000, 2_000, 4_000, 8_000, 8_000]; // delays before attempts to reconnect
const PEAK_FLOOR_DB = -50; // of the level meters

let config = null;
let talk = null; // the running conversation: { microphone, speaker, link, ... }

function address(path) {
  const found = new URL(path, location.href); // relative, as a proxy may serve the page under a path
  const key = new URLSearchParams(location.search).get("key");
  if (key) found.searchParams.set("key", key);
  return found;
}

// ---- what the user sees

function status(state, text) {
  if ($("status").textContent !== text) log.add("state", text);
  $("status").dataset.state = state;
  $("status").textContent = text;
}

function problem(text) {
  if (text) log.add("problem", text);
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function controls(running) {
  $("start").disabled = running || !config || Boolean(outOfReach());
  $("mute").disabled = $("stop").disabled = !running;
  $("transport").disabled = running;
  $("typed").disabled = $("send").disabled = !config;
  // a button that becomes disabled loses the focus to the page: keyboard users continue on its neighbour
  if (document.activeElement === document.body) $(running ? "stop" : "start").focus({ preventScroll: true });
}

function level(meter, peak) {
  const db = peak > 0 ? 20 * Math.log10(peak) : -Infinity;
  meter.value = Math.max(0, 1 - db / PEAK_FLOOR_DB);
}

function showConfig({ stt, llm, voice, random_weights, hints, transports }) {
  $("facts").textContent = [stt, llm, voice].filter(Boolean).join(" · ");
  $("noise").hidden = !random_weights;
  $("hints").hidden = !hints.length;
  $("hints").textContent = `Try saying: ${hints.map((hint) => `“${hint}”`).join(", ")}`;
  const known = transports.filter((name) => name in TRANSPORT_NAMES);
  $("transport").replaceChildren(...known.map((name) => new Option(TRANSPORT_NAMES[name], name)));
  $("over").hidden = known.length < 2;
}

// ---- messages from the bot

function onState({ user, bot }) {
  if (bot !== "thinking") clearTimeout(talk.thinking);
  else if (talk.bot !== "thinking") {
    talk.thinking = setTimeout(() => problem(`The language model has not answered for ${LLM_MS / 1000} s.`), LLM_MS);
  }
  talk.bot = bot;
  if (user === "speaking") talk.pageDelay_ms = null;
  if (talk.muted) status("muted", bot === "speaking" ? "Muted; the bot is speaking" : "Muted");
  else if (user === "speaking") status("user", "Hearing you");
  else if (bot === "speaking") status("bot", "Speaking");
  else if (bot === "thinking") status("thinking", "Thinking");
  else status("listening", "Listening");
}

// The playback delay of this page and the turn that it belongs to arrive in either order.
function onLatency(message) {
  times.show(message);
  log.add("latency", Object.entries(message).filter(([name]) => name !== "type").map(([name, value]) => `${name} ${value}`).join(", "));
  if (typeof message.first_audio_ms === "number") talk.turn = message.turn;
  pairDelay();
}

function pairDelay() {
  if (talk.turn === null || talk.pageDelay_ms === null) return;
  times.show({ turn: talk.turn, page_ms: talk.pageDelay_ms });
  talk.turn = talk.pageDelay_ms = null;
}

function onCaption(message) {
  talk.tries = 0; // the bot works
  lines.show(message);
  if (message.final) log.add(message.interrupted ? `${message.who}, interrupted` : message.who, message.text);
}

const handlers = {
  ready: ({ session }) => log.add("session", session),
  caption: onCaption,
  clear: () => talk.speaker?.clear(),
  latency: onLatency,
  state: (message) => onState((talk.state = message)),
  error: ({ message, fatal }) => (fatal ? end(message) : problem(message)),
};

function onMessage(message) {
  if (talk && handlers[message.type]) handlers[message.type](message);
}

// ---- audio in both directions

function onFrame(bytes) {
  if (!talk || !talk.link) return;
  if (talk.muted) new Int16Array(bytes).fill(0); // silence, by which the bot detects the end of speech
  level($("mic"), new Int16Array(bytes).reduce((peak, value) => Math.max(peak, Math.abs(value)), 0) / 32768);
  if (talk.link.sendAudio(bytes) !== false) $("sent").textContent = ++talk.sent;
}

function onPlayback({ peak, waited_ms, output_ms, ...counters }) {
  if (!talk) return;
  level($("bot"), peak);
  for (const name of ["played", "queued", "dropped", "lead"]) $(name).textContent = Math.round(counters[`${name}_ms`]);
  $("underruns").textContent = counters.underruns;
  if (waited_ms === null) return;
  talk.pageDelay_ms = waited_ms + output_ms;
  pairDelay();
}

// ---- a conversation from start to end

// typed: a first message for a conversation without a microphone; "" for a spoken conversation
async function start(typed = "") {
  const state = { user: "silent", bot: "silent" };
  const mine = { muted: false, sent: 0, turn: null, pageDelay_ms: null, state, typed, opened: false, tries: 0 };
  talk = mine;
  controls(true);
  problem("");
  lines.clear();
  times.clear();
  status("connecting", typed ? "Connecting" : "Asking for the microphone");
  try {
    if (!overWebRTC(mine)) {
      mine.speaker = await openSpeaker(config.output_rate_hz, onPlayback); // while the click still counts as a gesture
      if ($("speaker").value) await mine.speaker.choose($("speaker").value);
    }
    if (!typed) mine.microphone = await microphone();
    if (talk !== mine) return close(mine); // stopped while the browser asked for permission
    pickers.refresh(); // devices have names now
    status("connecting", "Connecting");
    await join(mine);
  } catch (error) {
    if (talk === mine) end(error.message);
    else close(mine);
  }
}

async function join(mine) {
  const link = await connect(mine);
  if (talk !== mine) return link.close();
  mine.link = link;
  link.useSpeaker?.($("speaker").value);
}

// Reconnects a conversation that was open, which starts with the bot's greeting; otherwise shows the reason.
async function lost(reason) {
  const mine = talk;
  const wait_ms = reason && mine.opened && RETRY_MS[mine.tries++];
  if (!wait_ms) return end(reason);
  log.add("lost", reason);
  mine.link?.close();
  mine.link = null;
  mine.speaker?.clear();
  clearTimeout(mine.thinking);
  lines.end();
  times.clear(); // the bot counts turns from one again
  status("connecting", "The connection was lost; connecting again");
  await new Promise((resolve) => setTimeout(resolve, wait_ms));
  if (talk === mine) await join(mine).catch(({ message }) => talk === mine && lost(message));
}

const microphone = () =>
  openMicrophone(config.input_rate_hz, onFrame, () => end("The microphone went away."), $("microphone").value);

// A typed conversation has no microphone, so it uses the WebSocket, which works without one.
const overWebRTC = (mine) => $("transport").value === "webrtc" && !mine.typed;

function connect(mine) {
  const ours = (act) => (value) => talk === mine && act(value);
  const events = {
    onOpen: ours(() => {
      mine.link.send(mine.typed && !mine.opened ? { type: "text", text: mine.typed } : { type: "hello" });
      mine.opened = true;
      if (mine.muted) mine.link.send({ type: "mute", muted: true });
      onState(mine.state);
    }),
    onMessage: ours(onMessage),
    onAudio: ours((bytes) => mine.speaker.play(bytes)),
    onReport: ours(onPlayback),
    onClose: ours(lost),
  };
  if (overWebRTC(mine)) return openPeer(address("agent/offer"), mine.microphone, events);
  return openSocket(address("agent"), events);
}

function close({ link, microphone, speaker, thinking }) {
  clearTimeout(thinking);
  for (const part of [link, microphone, speaker]) part?.close();
}

function end(reason = "") {
  if (!talk) return;
  log.add("end", reason);
  const ended = talk;
  talk = null;
  lines.end();
  close(ended);
  problem(reason);
  status("idle", reason ? "Not connected" : "Ended");
  mute(false);
  for (const meter of [$("mic"), $("bot")]) meter.value = 0;
  controls(false);
}

function mute(muted) {
  $("mute").setAttribute("aria-pressed", muted);
  $("mute").textContent = muted ? "Unmute" : "Mute";
  if (!talk) return;
  talk.muted = muted;
  log.add("mute", muted ? "on" : "off");
  if (talk.microphone) talk.microphone.track.enabled = !muted; // WebRTC sends the track itself
  talk.link?.send({ type: "mute", muted });
  onState(talk.state);
}

async function onDevice(kind, deviceId) {
  const list = kind === "audioinput" ? $("microphone") : $("speaker");
  log.add("device", list.selectedOptions[0]?.textContent);
  const mine = talk; // if null, the next conversation uses the device
  try {
    if (kind === "audiooutput") {
      await mine?.speaker?.choose(deviceId);
      await mine?.link?.useSpeaker?.(deviceId);
    } else if (mine?.microphone) {
      await changeMicrophone(mine);
    }
  } catch (error) {
    problem(error.message);
  }
}

async function changeMicrophone(mine) {
  const next = await microphone();
  if (talk !== mine) return next.close();
  next.track.enabled = !mine.muted;
  await mine.link?.useMicrophone?.(next);
  mine.microphone.close();
  mine.microphone = next;
}

function send(text) {
  if (!text || (talk && !talk.link)) return;
  $("typed").value = "";
  if (talk) talk.link.send({ type: "text", text });
  else start(text);
}

async function load() {
  if (outOfReach()) return problem(outOfReach()); // the server, too, would refuse a foreign host name
  try {
    const response = await fetch(address("agent/config"));
    if (!response.ok) throw new Error(REFUSALS[response.status] || `it answers HTTP ${response.status}`);
    config = await response.json();
    showConfig(config);
    controls(false);
  } catch (error) {
    problem(`The bot cannot be used: ${error.message}.`);
  }
}

$("start").onclick = () => start();
$("type").onsubmit = (event) => (event.preventDefault(), send($("typed").value.trim()));
$("copy").onclick = () => navigator.clipboard?.writeText(log.text());
$("stop").onclick = () => end();
$("mute").onclick = () => mute(!talk.muted);
addEventListener("keydown", ({ key, target, ctrlKey, metaKey, altKey }) => {
  if (key === "m" && talk && !["SELECT", "INPUT"].includes(target.tagName) && !(ctrlKey || metaKey || altKey)) mute(!talk.muted);
});
addEventListener("pagehide", () => end()); // a conversation must not outlive its page
$("speakers").hidden = !CAN_CHOOSE_SPEAKER;
const pickers = devicePickers({ audioinput: $("microphone"), audiooutput: $("speaker") }, onDevice);
controls(false);
load();
