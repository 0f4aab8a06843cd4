// Whether somebody can see the page, and what time it is. Everything that asks the daemon repeatedly looks here first.
//
// Invariant: while the page is hidden, nothing is polled.
import { signal } from "@preact/signals";

export const visible = signal(document.visibilityState !== "hidden");
/** Milliseconds since the epoch, to the second. */
export const now = signal(Date.now());

document.addEventListener("visibilitychange", () => {
  visible.value = document.visibilityState !== "hidden";
});

setInterval(() => {
  if (visible.value) now.value = Date.now();
}, 1000);
