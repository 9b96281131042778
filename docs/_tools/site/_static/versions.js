// List the versions beside this one, which docs/_tools/site/versions.py has written in versions.json.
// A copy that lies alone, or is read from files, has no list.
"use strict";
(() => {
  const root = document.documentElement.dataset.content_root;
  const list = document.getElementById("versions");
  if (!list || root === undefined || location.protocol === "file:") return;
  const here = new URL(root, location.href);
  const own = decodeURIComponent(here.pathname.split("/").at(-2) ?? "");
  fetch(new URL("../versions.json", here))
    .then((answer) => (answer.ok ? answer.json() : []))
    .then((names) => {
      for (const name of names) {
        const item = document.createElement("li");
        const link = document.createElement("a");
        item.className = name === own ? "toctree-l1 current-page" : "toctree-l1";
        link.className = name === own ? "reference current" : "reference";
        link.href = new URL(`../${encodeURIComponent(name)}/index.html`, here);
        link.textContent = name;
        item.append(link);
        list.querySelector("ul").append(item);
      }
      list.hidden = names.length < 2;
    })
    .catch(() => {});
})();
