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

// Children in their order; white space between them is no child. One with an id is known by it.
function solid(node) {
  return [...node.childNodes].filter((child) => child.nodeType !== Node.TEXT_NODE || child.data.trim());
}

function morphChildren(old, fresh) {
  const wanted = solid(fresh);
  const ids = new Set(wanted.map((child) => child.id));
  for (const child of solid(old)) if (child.id && !ids.has(child.id)) child.remove();
  const there = solid(old);
  const known = new Set(there.map((child) => child.id));
  for (const [at, child] of wanted.entries()) {
    if (at < there.length && (!child.id || known.has(child.id))) morph(there[at], child);
    else there.splice(at, 0, old.insertBefore(child.cloneNode(true), there[at] ?? null));
  }
  for (const child of there.slice(wanted.length)) child.remove();
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
    stopped = button.hidden = region.querySelector("[data-finished]") !== null;
    if (stopped) close();
  };
  source.addEventListener("away", (message) => tell("away", "stands still: " + message.data));
  source.onerror = () => {
    tell("away", "no connection, trying again");
    if (source?.readyState === EventSource.CLOSED) close();
  };
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
