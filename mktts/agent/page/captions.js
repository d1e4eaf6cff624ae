// Captions of both sides. The bot's line grows as it is spoken; text cut off by an interruption is marked as not heard.
const NAMES = { user: "You", bot: "Bot" };

export function captions(list) {
  const open = new Map(); // lines that may still change, by speaker and turn

  function line(who) {
    const item = document.createElement("li");
    item.className = who;
    const name = Object.assign(document.createElement("span"), { className: "who", textContent: NAMES[who] });
    const said = Object.assign(document.createElement("span"), { className: "said" });
    item.append(name, said);
    list.append(item);
    return item;
  }

  function mark(item, { unheard }) {
    item.classList.add("cut");
    item.append(" "); // for copied text and screen readers
    if (unheard) item.append(Object.assign(document.createElement("s"), { textContent: unheard, title: "not heard" }));
    item.append(" ", Object.assign(document.createElement("span"), { className: "mark", textContent: "interrupted" }));
  }

  return {
    show(message) {
      const { who, text, final, turn = "", interrupted } = message;
      if (!(who in NAMES)) return;
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      const key = `${who} ${turn}`;
      const item = open.get(key) || line(who);
      item.querySelector(".said").textContent = text;
      item.classList.toggle("open", !final);
      if (final) open.delete(key);
      else open.set(key, item);
      if (interrupted) mark(item, message);
      if (atEnd) list.scrollTop = list.scrollHeight;
    },
    // Ends the conversation: no line changes any more.
    end() {
      for (const item of open.values()) item.classList.remove("open");
      open.clear();
    },
    clear() {
      open.clear();
      list.replaceChildren();
    },
  };
}
