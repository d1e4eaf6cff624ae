// Which microphone and which loudspeaker: two lists that follow what is plugged in.
const KINDS = { audioinput: "microphone", audiooutput: "loudspeaker" };
export const CAN_CHOOSE_SPEAKER = "setSinkId" in (window.AudioContext?.prototype ?? {});

// lists: { audioinput, audiooutput }, two selects. onChange(kind, deviceId) when a person chooses, and when what was
// chosen is unplugged.
export function devicePickers(lists, onChange) {
  for (const [kind, list] of Object.entries(lists)) list.onchange = () => onChange(kind, list.value);

  let asked = 0;
  // Browsers name devices, and most list them, only once the microphone was allowed.
  async function refresh() {
    const mine = ++asked;
    const found = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
    if (mine !== asked) return; // a later answer counts, also where it comes first
    for (const [kind, list] of Object.entries(lists)) {
      const chosen = list.value;
      const usable = found.filter((device) => device.kind === kind && device.deviceId && device.deviceId !== "default");
      const options = usable.map((device, i) => new Option(device.label || `${KINDS[kind]} ${i + 1}`, device.deviceId));
      list.replaceChildren(new Option(`default ${KINDS[kind]}`, ""), ...options);
      list.value = usable.some((device) => device.deviceId === chosen) ? chosen : "";
      if (list.value !== chosen) onChange(kind, "");
    }
  }

  navigator.mediaDevices?.addEventListener("devicechange", refresh);
  refresh();
  return { refresh };
}
