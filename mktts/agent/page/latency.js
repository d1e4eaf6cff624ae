// Latencies in milliseconds from the end of the user's speech: the latest of each kind in tiles, all turns in a table.
const COLUMNS = ["transcript_ms", "first_token_ms", "first_audio_ms", "page_ms", "silence_ms"];

export function latency(tiles, table) {
  const rows = new Map();

  function row(turn) {
    if (!rows.has(turn)) {
      const added = table.insertRow();
      added.insertCell().textContent = turn;
      for (const name of COLUMNS) added.insertCell().dataset.name = name;
      rows.set(turn, added);
    }
    return rows.get(turn);
  }

  function put(turn, name, ms) {
    if (typeof ms !== "number") return;
    const text = String(Math.round(ms));
    row(turn).querySelector(`[data-name=${name}]`).textContent = text;
    const tile = tiles.querySelector(`[data-name=${name}]`);
    if (tile) tile.textContent = text;
  }

  return {
    show: (message) => COLUMNS.forEach((name) => put(message.turn, name, message[name])),
    clear() {
      rows.clear();
      table.replaceChildren();
      for (const tile of tiles.querySelectorAll("[data-name]")) tile.textContent = "–";
    },
  };
}
