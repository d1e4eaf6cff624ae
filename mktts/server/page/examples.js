// Code examples that send the page's request from other programs. Pure code: a test runs the examples.
const quoted = (text) => JSON.stringify(text);
const inShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// url: of the server, without a trailing slash. voice: null for the default. locked: whether the server has a key.
export const EXAMPLES = {
  curl({ url, voice, text, locked }) {
    const body = JSON.stringify(voice === null ? { input: text } : { input: text, voice });
    const key = locked ? '\n  -H "Authorization: Bearer YOUR_KEY" \\' : "";
    return `curl ${url}/v1/audio/speech -o speech.mp3 \\${key}
  -H "Content-Type: application/json" \\
  -d ${inShell(body)}`;
  },
  Python({ url, voice, text, locked }) {
    return `from openai import OpenAI

client = OpenAI(base_url=${quoted(`${url}/v1`)}, api_key="${locked ? "YOUR_KEY" : "any"}")
speech = client.audio.speech.with_streaming_response.create(
    model="tts-1", voice=${quoted(voice ?? "default")}, input=${quoted(text)}
)
with speech as response:
    response.stream_to_file("speech.mp3")`;
  },
  JavaScript({ url, voice, text, locked }) {
    const key = locked ? ', Authorization: "Bearer YOUR_KEY"' : "";
    return `const response = await fetch(${quoted(`${url}/v1/audio/speech`)}, {
  method: "POST",
  headers: { "Content-Type": "application/json"${key} },
  body: JSON.stringify({ input: ${quoted(text)}, voice: ${quoted(voice ?? "default")} }),
});
const sound = await response.blob(); // or stream response.body while it is generated`;
  },
  Pipecat({ url, voice, locked }) {
    const key = locked ? ', api_key="YOUR_KEY"' : "";
    return `from mktts.pipecat import MkttsTTSService, RemoteSource

tts = MkttsTTSService(
    source=RemoteSource(${quoted(url)}${key}),
    settings=MkttsTTSService.Settings(voice=${voice === null ? "None" : quoted(voice)}),
)`;
  },
  LiveKit({ url, voice, locked }) {
    const key = locked ? ', api_key="YOUR_KEY"' : "";
    return `from mktts.livekit import TTS

tts = TTS(${quoted(url)}${key}${voice === null ? "" : `, voice=${quoted(voice)}`})
session = AgentSession(tts=tts, stt=stt, llm=llm)`;
  },
};
