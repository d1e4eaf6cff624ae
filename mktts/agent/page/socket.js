// The conversation over one WebSocket: samples as binary messages, everything else as JSON text.
const REASONS = { 1008: "The key was refused.", 1013: "Too many conversations at once. Try again later." };
const ENOUGH_BYTES = 64_000; // with two seconds of microphone audio unsent, the network is gone: drop more

export function openSocket(address, { onOpen, onMessage, onAudio, onClose }) {
  const socket = new WebSocket(address.href.replace(/^http/, "ws"));
  socket.binaryType = "arraybuffer";
  socket.onopen = onOpen;
  socket.onmessage = ({ data }) => (typeof data === "string" ? onMessage(JSON.parse(data)) : onAudio(data));
  socket.onclose = ({ code, reason }) => onClose(code === 1000 ? "" : REASONS[code] || reason || "The connection was lost.");
  const open = () => socket.readyState === WebSocket.OPEN;
  return {
    send: (message) => open() && socket.send(JSON.stringify(message)),
    sendAudio: (bytes) => open() && socket.bufferedAmount < ENOUGH_BYTES && socket.send(bytes),
    close: () => socket.close(1000),
  };
}
