// A recording from a file or the microphone.
const LONGEST_MS = 60_000;

export function recordings({ file, record, drop, status }) {
  let blob = null, recorder = null, timer = null;

  function show(text) {
    status.textContent = text;
    drop.disabled = !blob;
    record.textContent = recorder ? "Stop recording" : "Record";
  }

  function take(found, called) {
    blob = found;
    show(blob ? `${called}, ${Math.ceil(blob.size / 1024)} KiB` : "No recording.");
  }

  async function start() {
    const wishes = { echoCancellation: false, noiseSuppression: false, autoGainControl: false, channelCount: 1 };
    const stream = await navigator.mediaDevices.getUserMedia({ audio: wishes });
    const pieces = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = ({ data }) => pieces.push(data);
    recorder.onstop = () => {
      clearTimeout(timer);
      for (const track of stream.getTracks()) track.stop();
      const type = recorder.mimeType;
      recorder = null;
      take(new Blob(pieces, { type }), "your recording");
    };
    recorder.start();
    timer = setTimeout(() => recorder?.stop(), LONGEST_MS);
    show("Recording…");
  }

  file.onchange = () => file.files.length && take(file.files[0], file.files[0].name);
  drop.onclick = () => {
    file.value = "";
    take(null, "");
  };
  record.onclick = async () => {
    if (recorder) return recorder.stop();
    if (!navigator.mediaDevices) return show("Browsers allow the microphone on localhost and https only.");
    try {
      await start();
    } catch (error) {
      show(`No microphone: ${error.message}`);
    }
  };
  return {
    blob: () => blob,
    async dataUrl() {
      const bytes = new Uint8Array(await blob.arrayBuffer());
      let text = "";
      for (let i = 0; i < bytes.length; i += 32_768) text += String.fromCharCode(...bytes.subarray(i, i + 32_768));
      return `data:${(blob.type || "application/octet-stream").split(";")[0]};base64,${btoa(text)}`;
    },
  };
}
