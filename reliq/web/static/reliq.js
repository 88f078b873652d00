// Keeps the live part of a page fresh, and knows some keys. Without it every page works by links and forms.
"use strict";

const region = document.querySelector("[data-live]");
const button = document.getElementById("live");
let source = null;
let stopped = false;

// Makes `old` equal to `fresh` and keeps the nodes that stay, so that focus, selection and scrolling stay too.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(fresh.cloneNode(true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.isEqualNode(fresh)) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  for (const [at, child] of wanted.entries()) {
    if (at < old.childNodes.length) morph(old.childNodes[at], child);
    else old.append(child.cloneNode(true));
  }
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function tell(state, text) {
  button.className = "live" + (state ? " " + state : "");
  if (button.textContent !== text) button.textContent = text;
}

function close() {
  source?.close();
  source = null;
}

function open() {
  if (source || stopped || document.hidden) return;
  source = new EventSource(region.dataset.live);
  source.onopen = () => tell("", "live");
  source.onmessage = (message) => {
    tell("", "live");
    morphChildren(region, new DOMParser().parseFromString(message.data, "text/html").body);
    if (region.querySelector("[data-finished]")) finish();
  };
  source.addEventListener("away", (message) => tell("away", message.data));
  source.onerror = () => {
    tell("away", "no connection, trying again");
    if (source?.readyState === EventSource.CLOSED) close();
  };
}

function finish() {
  stopped = true;
  close();
  button.hidden = true;
}

if (region) {
  button.hidden = false;
  button.addEventListener("click", () => {
    stopped = !stopped;
    if (stopped) { close(); tell("off", "stopped"); } else open();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  setInterval(open, 5000); // after a refusal, which ends an EventSource for good
  open();
}

// A page that says that Redis is away asks again.
const retry = document.querySelector("[data-retry]");
if (retry) setTimeout(() => location.replace(location.href), 1000 * retry.dataset.retry);

// `/` goes to the search, j and k through the rows.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.closest("details")?.setAttribute("open", ""); search.focus(); }
  } else if (event.key === "j" || event.key === "k") {
    const rows = [...document.querySelectorAll("tbody th a")];
    const next = rows[rows.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1)];
    (next ?? rows[0])?.focus();
  }
});
