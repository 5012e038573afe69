// Classic and in <head>: a module would run after the first paint, and the page would flash in the wrong colours.
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "auto";
