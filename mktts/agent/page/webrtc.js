// The conversation over WebRTC: the browser's own audio path, and the same JSON messages on a data channel.
// It uses no STUN or TURN server, so it only reaches peers that the network reaches directly.
const GATHER_MS = 2_000;
const REPORT_MS = 200;

export async function openPeer(address, microphone, { onOpen, onMessage, onReport, onClose }) {
  const peer = new RTCPeerConnection({ iceServers: [] });
  const channel = peer.createDataChannel("chat", { ordered: true });
  const sound = new Audio();
  const { sender } = peer.addTransceiver(microphone.track, { direction: "sendrecv", streams: [microphone.stream] });
  for (let i = 0; i < 2; i++) peer.addTransceiver("video", { direction: "recvonly" }); // Pipecat expects three in all
  peer.ontrack = ({ track }) => {
    if (track.kind !== "audio") return;
    sound.srcObject = new MediaStream([track]);
    sound.play();
  };
  channel.onopen = onOpen;
  channel.onmessage = ({ data }) => onMessage(JSON.parse(data));
  channel.onclose = () => onClose("");
  peer.onconnectionstatechange = () => {
    if (peer.connectionState === "failed") onClose("No network path to the bot was found; choose WebSocket.");
  };
  const close = () => {
    clearInterval(reporting);
    channel.onclose = null; // closed on purpose: not a lost connection
    sound.pause();
    peer.close();
  };
  const reporting = setInterval(async () => {
    for (const found of (await peer.getStats()).values()) {
      if (found.type === "inbound-rtp" && found.kind === "audio") onReport(playback(found));
    }
  }, REPORT_MS);
  try {
    await peer.setLocalDescription(await peer.createOffer());
    await gathered(peer);
    await peer.setRemoteDescription(await exchange(address, peer.localDescription));
  } catch (error) {
    close();
    throw error;
  }
  return {
    send: (message) => channel.readyState === "open" && channel.send(JSON.stringify(message)),
    sendAudio: () => {}, // the peer connection carries the track itself
    useMicrophone: ({ track }) => sender.replaceTrack(track),
    useSpeaker: (deviceId) => sound.setSinkId?.(deviceId),
    close,
  };
}

// Converts the browser's statistics of received audio to the report of the loudspeaker's worklet. The delay is the mean
// time in the browser's jitter buffer; the played time includes silence between utterances.
function playback({ audioLevel, jitterBufferDelay, jitterBufferTargetDelay, jitterBufferEmittedCount, ...found }) {
  const mean_ms = (total_s) => (jitterBufferEmittedCount ? (1000 * total_s) / jitterBufferEmittedCount : 0);
  return {
    peak: audioLevel ?? 0,
    waited_ms: mean_ms(jitterBufferDelay),
    queued_ms: mean_ms(jitterBufferDelay),
    lead_ms: mean_ms(jitterBufferTargetDelay),
    played_ms: 1000 * found.totalSamplesDuration,
    dropped_ms: 0, // the bot sends audio in real time, so nothing is queued that could be dropped
    underruns: found.concealmentEvents,
    output_ms: 0,
  };
}

function gathered(peer) {
  return new Promise((resolve) => {
    const check = () => peer.iceGatheringState === "complete" && resolve();
    peer.addEventListener("icegatheringstatechange", check);
    setTimeout(resolve, GATHER_MS);
    check();
  });
}

async function exchange(address, { sdp, type }) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(address, { method: "POST", headers, body: JSON.stringify({ sdp, type }) });
  if (!response.ok) throw new Error(`The bot refused the connection (HTTP ${response.status}).`);
  return response.json();
}
