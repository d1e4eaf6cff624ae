// Plays PCM as it is generated: one audio clock per widget model, with any number of views (a button and a status
// line). The kernel sends s16le mono chunks as binary custom messages; each becomes an AudioBufferSourceNode that
// starts where the previous one ends. It does not use AudioWorklet, which is missing on remote hosts over plain http.
const COUNT_MS = 200; // interval at which the status line is updated
const LEAD_S = 0.005; // after a gap, chunks are scheduled this far ahead, so that start() is never in the past

function initialize({ model }) {
  const rate = model.get("sample_rate_hz");
  const clock = new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
  let playing = new Set(), end_s = 0, gaps = 0, chunks = 0, muted = false, complete = true, first_sound_ms = null;
  let made_s = 0, counting = null;

  const count = (state) => { // done in the page, so that it continues while the kernel is busy
    const number = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`;
    const heard_s = made_s - Math.max(0, end_s - clock.currentTime);
    const sound = first_sound_ms === null ? "queued behind earlier audio"
      : `first sound ${first_sound_ms.toFixed(0)} ms after arrival`;
    const held = clock.state === "suspended" ? "; press any key to let the page play sound" : "";
    const seconds = `${Math.max(0, heard_s).toFixed(1)} of ${made_s.toFixed(1)} s heard`;
    model.set("status", `${state}: ${number(chunks, "chunk")}, ${seconds}, ${number(gaps, "gap")}, ${sound}${held}`);
  };
  const uncount = () => { clearInterval(counting); counting = null; };
  const report = (event) => {
    model.send({ kind: event, chunks, gaps, first_sound_ms, context: clock.state, rate_hz: clock.sampleRate });
    if (["played", "stopped"].includes(event)) uncount();
    if (chunks) count({ first: "playing", made: "all made, still playing" }[event] || event);
    model.save_changes();
  };
  const flush = () => { // drops the queued audio
    made_s -= Math.max(0, Math.min(made_s, end_s - clock.currentTime));
    playing.forEach((node) => node.stop());
    playing.clear();
    end_s = 0;
  };
  const resume = () => { if (clock.state === "suspended") clock.resume(); }; // browsers want a user gesture first

  function play(bytes) {
    const samples = new Float32Array(bytes.byteLength / 2);
    for (let i = 0; i < samples.length; i++) samples[i] = bytes.getInt16(2 * i, true) / 32768;
    const buffer = clock.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(samples, 0);
    const node = new AudioBufferSourceNode(clock, { buffer });
    node.connect(clock.destination);
    node.onended = () => {
      playing.delete(node);
      if (complete && !muted && !playing.size) report("played");
    };
    playing.add(node);
    if (end_s < clock.currentTime) {
      if (chunks > 0) gaps += 1; // playback ran dry within the utterance
      end_s = clock.currentTime + LEAD_S;
    }
    node.start(end_s);
    if (chunks === 0 && playing.size === 1) first_sound_ms = 1000 * (end_s - clock.currentTime + (clock.outputLatency || 0));
    end_s += buffer.duration;
    chunks += 1;
    made_s += buffer.duration;
    if (chunks === 1) report("first");
    counting ??= setInterval(() => count(complete ? "all made, still playing" : "playing"), COUNT_MS);
  }

  model.on("msg:custom", (message, buffers) => {
    if (message.kind === "begin") { resume(); chunks = gaps = made_s = 0; first_sound_ms = null; muted = complete = false; }
    else if (message.kind === "pcm" && !muted && buffers[0].byteLength) play(buffers[0]);
    else if (message.kind === "end") {
      complete = true;
      if (!muted) report(playing.size ? "made" : "played");
    }
  });
  model.on("change:stop_requested", () => {
    if (model.get("stop_requested")) { muted = true; flush(); report("stopped"); }
  });
  document.addEventListener("pointerdown", resume);
  document.addEventListener("keydown", resume);
  return () => {
    document.removeEventListener("pointerdown", resume);
    document.removeEventListener("keydown", resume);
    uncount();
    flush();
    clock.close();
  };
}

function render({ model, el }) {
  const stop = Object.assign(document.createElement("button"), { textContent: "Stop", className: "jupyter-button" });
  const line = Object.assign(document.createElement("span"), { style: "margin-left: 1em" });
  const show = () => { line.textContent = model.get("status"); };
  stop.onclick = () => { model.set("stop_requested", true); model.save_changes(); };
  model.on("change:status", show);
  show();
  el.append(stop, line);
  return () => model.off("change:status", show);
}

export default { initialize, render };
