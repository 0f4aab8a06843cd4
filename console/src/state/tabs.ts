// What the tabs of one browser, and the frames in them, tell each other about their session: the cookie is the same in all of them.
//
// Invariant: what is told names nobody and permits nothing. Whoever hears it asks the daemon.

/** Somebody has signed in, or has signed out. */
export type Told = "in" | "out";

const channel = new BroadcastChannel("spillway-session");

/** Tells all others. */
export function tell(what: Told): void {
  channel.postMessage(what);
}

/** Calls back for what another one tells. */
export function onTold(hear: (what: Told) => void): void {
  channel.addEventListener("message", ({ data }) => hear(data as Told));
}
