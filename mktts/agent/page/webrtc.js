// The conversation over WebRTC: the browser's own audio path, and the same JSON messages on a data channel.
// No STUN or TURN server is named: it reaches what the network reaches without one.
const GATHER_MS = 2_000;

export async function openPeer(address, microphone, { onOpen, onMessage, onClose }) {
  const peer = new RTCPeerConnection({ iceServers: [] });
  const channel = peer.createDataChannel("chat", { ordered: true });
  const sound = new Audio();
  const { sender } = peer.addTransceiver(microphone.track, { direction: "sendrecv", streams: [microphone.stream] });
  for (let i = 0; i < 2; i++) peer.addTransceiver("video", { direction: "recvonly" }); // the bot answers to three
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
  try {
    await peer.setLocalDescription(await peer.createOffer());
    await gathered(peer);
    await peer.setRemoteDescription(await exchange(address, peer.localDescription));
  } catch (error) {
    peer.close();
    throw error;
  }
  return {
    send: (message) => channel.readyState === "open" && channel.send(JSON.stringify(message)),
    sendAudio: () => {}, // the peer connection carries the track itself
    useMicrophone: ({ track }) => sender.replaceTrack(track),
    useSpeaker: (deviceId) => sound.setSinkId?.(deviceId),
    close: () => (sound.pause(), peer.close()),
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
