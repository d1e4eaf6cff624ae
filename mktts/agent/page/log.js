// An event log for debugging and bug reports, with times since the page was opened.
const KEPT = 500;

export function eventLog(list) {
  return {
    add(kind, text = "") {
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      const item = document.createElement("li");
      item.className = kind;
      const cells = [(performance.now() / 1000).toFixed(3), kind, text];
      item.append(...cells.flatMap((cell, i) => [i ? " " : "", Object.assign(document.createElement("span"), { textContent: cell })]));
      list.append(item);
      while (list.children.length > KEPT) list.firstElementChild.remove();
      if (atEnd) list.scrollTop = list.scrollHeight;
    },
    text: () => [...list.children].map((item) => item.textContent).join("\n"),
  };
}
