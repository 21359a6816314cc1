// The theme that the viewer chose, before anything is drawn: auto, light or dark.
const theme = localStorage.getItem("tinkex-theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
