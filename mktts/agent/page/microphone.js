// Opens the microphone as a source of frames for the bot; its errors are messages for the user.
const FRAME_MS = 20;
const WISHES = { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 };

// onFrame gets an ArrayBuffer of 16-bit samples every 20 ms. Throws an Error whose message can be shown to the user.
// deviceId: "" for the browser's default.
export async function openMicrophone(rateHz, onFrame, onLost, deviceId = "") {
  const stream = await ask(deviceId);
  const context = new AudioContext({ latencyHint: "interactive" }); // at the device's rate: not every browser converts
  try {
    await context.audioWorklet.addModule(new URL("capture.js", import.meta.url));
    const options = { rateHz, frameSamples: (rateHz * FRAME_MS) / 1000 };
    const capture = new AudioWorkletNode(context, "capture", {
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: "explicit",
      processorOptions: options,
    });
    capture.port.onmessage = ({ data }) => onFrame(data);
    context.createMediaStreamSource(stream).connect(capture);
    await context.resume();
  } catch (error) {
    release(stream, context);
    throw error;
  }
  const [track] = stream.getAudioTracks();
  track.onended = onLost;
  return { stream, track, rateHz: context.sampleRate, close: () => release(stream, context) };
}

function release(stream, context) {
  for (const track of stream.getTracks()) track.stop();
  context.close();
}

async function ask(deviceId) {
  const audio = deviceId ? { ...WISHES, deviceId: { exact: deviceId } } : WISHES;
  try {
    return await navigator.mediaDevices.getUserMedia({ audio });
  } catch (error) {
    throw new Error(explain(error));
  }
}

// Why browsers refuse this page the microphone regardless of permission; "" if they do not.
export function outOfReach() {
  if (window.isSecureContext && navigator.mediaDevices) return "";
  const port = location.port || 80;
  return (
    `Browsers give a microphone only to https pages and to localhost; this page is at ${location.origin}. ` +
    `Forward the port (ssh -L ${port}:localhost:${port} HOST) and open http://localhost:${port}/ instead.`
  );
}

function explain({ name, message }) {
  if (name === "NotAllowedError" && framedWithoutMicrophone()) {
    return 'The frame around this page keeps the microphone from it: the iframe needs allow="microphone; autoplay".';
  }
  const known = {
    NotAllowedError: "The microphone was refused. Allow it for this page in the browser's address bar, then start again.",
    NotFoundError: "No microphone was found. Connect one, then start again.",
    OverconstrainedError: "The chosen microphone is gone. Choose another one, then start again.",
    NotReadableError: "The microphone is in use by another program. Close that, then start again.",
  };
  return known[name] || `The microphone could not be opened: ${message || name}.`;
}

function framedWithoutMicrophone() {
  const policy = document.permissionsPolicy || document.featurePolicy;
  return window.top !== window && Boolean(policy) && !policy.allowsFeature("microphone");
}
