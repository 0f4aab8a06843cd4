// Who is signed in, and what their role permits. Owns the session; never sees a token longer than it takes to send it.
//
// Invariant: the role only decides what the page offers. What is permitted is decided by the daemon.
import { signal } from "@preact/signals";
import { ApiError, hooks, raw } from "../api/client.ts";

export type Role = "read" | "operate" | "admin";
export interface Session {
  caller: string;
  role: Role;
  by: "socket" | "token" | "session";
  seconds_left: number | null;
}

export type SessionState =
  | { is: "unknown" }
  | { is: "in"; session: Session }
  | { is: "out"; why: "never" | "ended" };

export const session = signal<SessionState>({ is: "unknown" });
/** Since when the daemon does not answer, in milliseconds; null while it does. */
export const awaySince = signal<number | null>(null);
/** What to do about that, if it is known. */
export const awayAdvice = signal<string | null>(null);

hooks.unauthenticated = () => {
  session.value = { is: "out", why: session.value.is === "in" ? "ended" : "never" };
};
hooks.unreachable = (advice) => {
  awaySince.value ??= Date.now();
  awayAdvice.value = advice;
};
hooks.answered = () => {
  awaySince.value = null;
};

/** Asks who the caller is, until the daemon answers. */
export async function begin(): Promise<void> {
  for (let wait = 1000; ; wait = Math.min(wait * 2, 10_000)) {
    try {
      const { body } = await raw<Session>("GET", "/v1/session");
      session.value = { is: "in", session: body };
      return;
    } catch (error) {
      if (error instanceof ApiError && error.problem.status === 401) return;
      // A daemon without sessions decides by itself who the caller is.
      if (error instanceof ApiError && error.code === "not_found") {
        session.value = {
          is: "in",
          session: { caller: "", role: "admin", by: "socket", seconds_left: null },
        };
        return;
      }
      await new Promise((done) => setTimeout(done, wait));
    }
  }
}

export async function login(token: string): Promise<void> {
  const { body } = await raw<Session>("POST", "/v1/session", { body: { token } });
  session.value = { is: "in", session: body };
}

export async function logout(): Promise<void> {
  await raw("DELETE", "/v1/session");
  session.value = { is: "out", why: "never" };
}

const ORDER: Role[] = ["read", "operate", "admin"];

export function can(role: Role): boolean {
  const state = session.value;
  return state.is === "in" && ORDER.indexOf(state.session.role) >= ORDER.indexOf(role);
}
