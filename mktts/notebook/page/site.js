// The search box: sections of SEARCH (search.js) that hold every word that was typed, those with a word in the heading first.
const box = document.getElementById("search");
const found = document.getElementById("found");
const MOST = 12, AROUND = 70; // results; characters of prose before and after the first word

function marked(parent, text, words) {
  const lower = text.toLowerCase();
  for (let at = 0; at < text.length; ) {
    const word = words.find((one) => lower.startsWith(one, at));
    if (word) {
      const mark = document.createElement("mark");
      mark.textContent = text.slice(at, at + word.length);
      parent.append(mark);
    } else parent.append(text[at]);
    at += word ? word.length : 1;
  }
}

function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.replaceChildren();
  found.hidden = words.length === 0;
  if (found.hidden) return;
  const score = (one) => words.filter((word) => one.heading.toLowerCase().includes(word)).length;
  const hits = SEARCH.filter((one) => {
    const all = `${one.page} ${one.heading} ${one.text}`.toLowerCase();
    return words.every((word) => all.includes(word));
  }).sort((a, b) => score(b) - score(a));
  for (const hit of hits.slice(0, MOST)) {
    const item = document.createElement("li"), link = document.createElement("a"), prose = document.createElement("small");
    link.href = hit.address;
    marked(link, hit.heading, words);
    const places = words.map((word) => hit.text.toLowerCase().indexOf(word)).filter((at) => at >= 0);
    const from = Math.max(0, Math.min(...(places.length ? places : [0])) - AROUND);
    prose.append(`${hit.page}: ${from ? "…" : ""}`);
    marked(prose, hit.text.slice(from, from + 2 * AROUND), words);
    item.append(link, prose);
    found.append(item);
  }
  if (!hits.length) found.append(Object.assign(document.createElement("li"), { textContent: "Nothing found." }));
}

box.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input")) {
    event.preventDefault();
    box.focus();
  }
  if (event.key === "Escape") {
    box.value = "";
    search();
  }
});
document.addEventListener("click", (event) => {
  if (!event.target.closest('[role="search"]') || event.target.closest("#found a")) found.hidden = true;
});
if (matchMedia("(max-width: 800px)").matches) document.querySelector(".contents details")?.removeAttribute("open");
