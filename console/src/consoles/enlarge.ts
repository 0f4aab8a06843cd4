// The button that gives the page the whole screen, and back. The console goes on as it is.
import { element } from "./link.ts";

export function enlargeable(resized: () => void): void {
  const button = element("enlarge");
  if (!document.fullscreenEnabled) {
    button.hidden = true;
    return;
  }
  button.addEventListener("click", () => {
    const done = document.fullscreenElement
      ? document.exitFullscreen()
      : document.documentElement.requestFullscreen();
    done.catch(() => {
      // The browser does not allow it: the page stays as large as it is.
    });
  });
  document.addEventListener("fullscreenchange", () => {
    button.textContent = document.fullscreenElement ? "Make smaller" : "Enlarge";
    resized();
  });
}
