// Why a console or a screen cannot be opened. A WebSocket that is refused says no reason, so the daemon is asked before.
import type { Machine } from "../api/client.ts";
import { through } from "../shown-host.ts";
import { adviceOf, type Reply, transport } from "../transport.ts";

export interface Refusal {
  why: string;
  /** It stays so until somebody does something. Otherwise it may be another one soon. */
  isFinal: boolean;
}

const final = (why: string): Refusal => ({ why, isFinal: true });
const AWAY: Refusal = { why: "spillwayd does not answer", isFinal: false };

type Get = (path: string) => Promise<Reply>;
const DEADLINE_MS = 20_000;
const get: Get = (path) =>
  transport.request({ method: "GET", path, signal: AbortSignal.timeout(DEADLINE_MS) });

/** Null: there is no reason. */
export async function refusal(
  what: "console" | "screen",
  name: string,
  ask: Get = get,
): Promise<Refusal | null> {
  try {
    return ofSession(what, await ask("/v1/session")) ?? ofMachine(what, name, await ask(path(name)));
  } catch (error) {
    const advice = adviceOf(error);
    return advice === null ? AWAY : { why: advice, isFinal: false };
  }
}

/** Where the console or the screen of a machine is. */
export function path(name: string, what?: "console" | "screen"): string {
  return through(`/v1/machines/${encodeURIComponent(name)}${what ? `/${what}` : ""}`);
}

function ofSession(what: string, { status, body }: Reply): Refusal | null {
  if (status === 401) return final("you are not signed in: sign in to the console of this host first");
  if (status !== 200) return AWAY;
  const role = (body as { role?: string } | null)?.role;
  if (role === "operate" || role === "admin") return null;
  return final(`the ${what} of a machine needs the role operate, and you have the role ${role}`);
}

function ofMachine(what: string, name: string, { status, body }: Reply): Refusal | null {
  if (status === 404) return final(`there is no machine ${name}`);
  if (status !== 200) return AWAY;
  const run = (body as Machine).status.run;
  if (!run) return { why: "the machine is off", isFinal: false };
  if (what === "screen" && run.display !== "vnc")
    return final(
      "the machine has no screen: its catalog needs the display vnc, which it gets at its next start",
    );
  if (what === "console" && !run.console_socket) return final("the machine has no serial console");
  return null;
}
