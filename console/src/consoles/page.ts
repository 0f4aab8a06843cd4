// What the pages of a serial console and of a screen share: their elements, the machine of the address, and the way in and out
// for who uses the keyboard alone.
//
// Invariant: Tab never leads into the console, which takes it for itself: a button does, and Ctrl+] leads back to that button.
import { hostOf } from "../shown-host.ts";

/** An element of the page, which has it. */
export function element(id: string): HTMLElement {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no ${id}`);
  return found;
}

/** The machine that the page's address names: `serial.html#/machines/NAME`, or `#/@HOST/machines/NAME`. Null: none. */
export function machineOf(hash: string): string | null {
  const path = hostOf(hash) ? hash.replace(/@[^/]*\//, "") : hash;
  return path.match(/^#\/machines\/([a-z0-9][a-z0-9.-]{0,127})$/i)?.[1] ?? null;
}

/** Whether a key leaves the console: Ctrl+], as in `spillway machine console`, by its sign or by its place. */
export function isLeaving(key: Pick<KeyboardEvent, "type" | "ctrlKey" | "altKey" | "key" | "code">): boolean {
  if (key.type !== "keydown" || !key.ctrlKey) return false;
  return key.key === "]" || (key.code === "BracketRight" && !key.altKey);
}

/** Whether the page is a window of its own. In a frame, the focus belongs to the page around it. */
export function isOwnWindow(): boolean {
  return window.parent === window;
}

/** Shows a button or not. The focus of one that goes is given to the title: it must not get lost. */
export function show(button: HTMLElement, isShown: boolean): void {
  if (!isShown && button === document.activeElement) element("title").focus();
  button.hidden = !isShown;
}

/** Gives the page the whole screen and back, by a button. The console goes on as it is. */
export function enlargeable(): void {
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
  });
}
