// Refreshes the live part of a page, and binds some keys. Without JavaScript every page works by links and forms.
const live = document.querySelector("[data-live]");
const button = document.getElementById("live");
const report = (state, text) => Object.assign(button, { className: `live ${state}`, textContent: text });
let stopped = false;

async function refresh() {
  const answer = await fetch(location.href, { signal: AbortSignal.timeout(30_000) });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.querySelector("[data-live]");
  if (stopped) return;
  if (!answer.ok) throw new Error(page.querySelector("h1")?.textContent ?? answer.status);
  if (fresh?.dataset.live !== live.dataset.live) location.reload(); // its task has ended, or Redis is back
  else Idiomorph.morph(live, fresh);
  report("", "live");
}

async function poll() {
  const failed = (error) => report("away", `could not refresh: ${error.message}`);
  if (!stopped && !document.hidden) await refresh().catch(failed);
  setTimeout(poll, 2000);
}

if (live) {
  button.hidden = false;
  button.addEventListener("click", () => {
    stopped = !stopped;
    report(stopped ? "off" : "", stopped ? "stopped" : "live");
  });
  setTimeout(poll, 2000);
}

// `/` goes to the search, j and k through the rows.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const rows = [...document.querySelectorAll("tbody th a")];
  const at = rows.indexOf(document.activeElement);
  const search = document.querySelector("input[type=search]");
  const found = { "/": search, j: rows[at + 1] ?? rows[0], k: rows[at - 1] ?? rows[0] }[event.key];
  if (!found) return;
  event.preventDefault();
  found.closest("details")?.setAttribute("open", "");
  found.focus();
});
