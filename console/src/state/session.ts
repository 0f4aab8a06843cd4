// Who is signed in, and what their role permits. Owns the session; never sees a token longer than it takes to send it.
//
// Invariant: the role only decides what the page offers. What is permitted is decided by the daemon. Nothing that was read in
// one session is there in another: between two, the page is loaded anew.
import { computed, signal } from "@preact/signals";
import { ApiError, hooks, raw, words } from "../api/client.ts";
import { visible } from "./visible.ts";

export type Role = "read" | "operate" | "admin";
export interface Session {
  caller: string;
  role: Role;
  by: "socket" | "token" | "session";
  seconds_left: number | null;
}

export type SessionState =
  /** Not known yet; `why`: the daemon has answered, and did not say it. */
  | { is: "unknown"; why: string | null }
  | { is: "in"; session: Session }
  | { is: "out"; why: "never" | "ended" };

export const session = signal<SessionState>({ is: "unknown", why: null });
export const isSignedIn = computed(() => session.value.is === "in");
/** Since when the daemon does not answer, in milliseconds; null while it does. */
export const awaySince = signal<number | null>(null);
/** What to do about that, if it is known. */
export const awayAdvice = signal<string | null>(null);

/** What the history of the browser keeps over a new load of the page: that a session has ended. */
const ENDED = { spillway: "ended" };
/** The session is not asked for more often, however many requests are refused. */
const ASK_MS = 3000;

hooks.unreachable = (advice) => {
  awaySince.value ??= Date.now();
  awayAdvice.value = advice;
};
hooks.answered = () => {
  awaySince.value = null;
};
hooks.refused = () => void renew();

/** When the session was asked for last, in milliseconds since the epoch. */
let asked = 0;

async function ask(): Promise<Session> {
  asked = Date.now();
  const { body } = await raw<Session>("GET", "/v1/session");
  return body;
}

const isUnauthenticated = (error: unknown) => error instanceof ApiError && error.problem.status === 401;

/** Asks who the caller is, until the daemon says it. */
export async function begin(): Promise<void> {
  for (let wait = 1000; ; wait = Math.min(wait * 2, 10_000)) {
    try {
      session.value = { is: "in", session: await ask() };
      return;
    } catch (error) {
      if (isUnauthenticated(error)) {
        const isEnded = history.state?.spillway === ENDED.spillway;
        session.value = { is: "out", why: isEnded ? "ended" : "never" };
        return;
      }
      if (error instanceof ApiError) session.value = { is: "unknown", why: words(error) };
      await new Promise((done) => setTimeout(done, wait));
    }
  }
}

/** Asks again who the caller is: the session may have ended, or be that of somebody else by now. */
export async function renew(): Promise<void> {
  const before = session.value;
  if (before.is !== "in" || Date.now() - asked < ASK_MS) return;
  try {
    const now = await ask();
    const { caller, role, by } = before.session;
    if (now.caller !== caller || now.role !== role || now.by !== by) loadAnew();
    else session.value = { is: "in", session: now };
  } catch (error) {
    // Anything else says nothing about the session.
    if (isUnauthenticated(error)) end();
  }
}

visible.subscribe((isVisible) => {
  if (isVisible) void renew();
});

/** Whether the session is over: then the page is loaded anew, and nobody is asked whether something would be lost. */
export const isOver = signal(false);

function loadAnew(): void {
  isOver.value = true;
  location.reload();
}

function end(): void {
  history.replaceState(ENDED, "");
  loadAnew();
}

export async function login(token: string): Promise<void> {
  const { body } = await raw<Session>("POST", "/v1/session", { body: { token } });
  history.replaceState(null, "");
  session.value = { is: "in", session: body };
}

/** Ends the session, and everything that the page knows. */
export async function logout(): Promise<void> {
  try {
    await raw("DELETE", "/v1/session");
  } catch (error) {
    // Whom the daemon refuses has no session any more.
    if (!(error instanceof ApiError)) throw error;
  }
  loadAnew();
}

const ORDER: Role[] = ["read", "operate", "admin"];

/** Whether the role permits what needs this one. A role that is not known permits nothing. */
export function can(role: Role): boolean {
  const state = session.value;
  return state.is === "in" && ORDER.indexOf(state.session.role) >= ORDER.indexOf(role);
}
