// Lists to choose a microphone and a loudspeaker; they follow the devices that are plugged in.
const KINDS = { audioinput: "microphone", audiooutput: "loudspeaker" };
export const CAN_CHOOSE_SPEAKER = "setSinkId" in (window.AudioContext?.prototype ?? {});

// lists: { audioinput, audiooutput }, two select elements. onChange(kind, deviceId): called when the user chooses a
// device, and when the chosen device is unplugged.
export function devicePickers(lists, onChange) {
  for (const [kind, list] of Object.entries(lists)) list.onchange = () => onChange(kind, list.value);

  let asked = 0;
  // Most browsers list devices, and all name them, only after the user has allowed the microphone.
  async function refresh() {
    const mine = ++asked;
    const found = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
    if (mine !== asked) return; // outdated: a later query has been made
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
