// Who is signed in, and what their role permits. Owns the session; never sees a token longer than it takes to send it.
//
// Invariant: the role only decides what the page offers. What is permitted is decided by the daemon. Nothing that one caller has read
// or filled in is there for another caller or role: between two, the page is loaded anew. At the end of a session, also by the clock of
// the browser alone, the page is covered and asks for nothing, until the same caller signs in with the same role.
import { computed, signal } from "@preact/signals";
import { ApiError, hooks, raw, words } from "../api/client.ts";
import { onTold, tell } from "./tabs.ts";
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
  { is: "unknown"; why: string | null } | { is: "in"; session: Session } | { is: "out" };

export const session = signal<SessionState>({ is: "unknown", why: null });
/** Whether the session of a page has ended under it. The page stays as it was, for whoever signs in again. */
export const hasEnded = signal(false);
export const isSignedIn = computed(() => session.value.is === "in" && !hasEnded.value);
/** Since when the daemon does not answer, in milliseconds; null while it does. */
export const awaySince = signal<number | null>(null);
/** What to do about that, if it is known. */
export const awayAdvice = signal<string | null>(null);

/** The session is not asked for more often, however many requests are refused. */
const ASK_MS = 3000;

hooks.unreachable = (advice) => {
  awaySince.value ??= Date.now();
  awayAdvice.value = advice;
};
hooks.answered = () => {
  awaySince.value = null;
};
hooks.refused = () => {
  if (isSignedIn.peek() && Date.now() - asked >= ASK_MS) void renew();
};

/** When the session was asked for last, in milliseconds since the epoch. */
let asked = 0;
/** When the session ends by the clock of the browser, in milliseconds since the epoch. */
let endsAt = Number.POSITIVE_INFINITY;
/** How often the clock is looked at: after a suspend, a timer would be late. */
const LOOK_MS = 1000;

async function ask(): Promise<Session> {
  asked = Date.now();
  const { body } = await raw<Session>("GET", "/v1/session");
  return body;
}

export const isUnauthenticated = (error: unknown) =>
  error instanceof ApiError && error.problem.status === 401;

/** Asks who the caller is, until the daemon says it. */
export async function begin(): Promise<void> {
  for (let wait = 1000; ; wait = Math.min(wait * 2, 10_000)) {
    const mine = turn;
    try {
      const now = await ask();
      if (mine !== turn) continue;
      enter(now);
      return;
    } catch (error) {
      if (mine !== turn) continue;
      if (isUnauthenticated(error)) {
        session.value = { is: "out" };
        return;
      }
      if (error instanceof ApiError) session.value = { is: "unknown", why: words(error) };
      await new Promise((done) => setTimeout(done, wait));
    }
  }
}

/** Grows with each question, login and message of another tab: an answer to an earlier question says nothing any more. */
let turn = 0;

/** Asks again who the caller is: the session may have ended, or be that of somebody else by now. */
async function renew(): Promise<void> {
  // It is asked for already.
  if (session.value.is === "unknown") return;
  const mine = ++turn;
  try {
    const now = await ask();
    if (mine === turn) enter(now);
  } catch (error) {
    // Anything else says nothing about the session.
    if (mine === turn && isUnauthenticated(error)) end();
  }
}

/** Covers the page when the time of its session is over, before the daemon is asked: its answer may take long. */
function endByClock(): boolean {
  if (!isSignedIn.peek() || Date.now() < endsAt) return false;
  end();
  return true;
}

setInterval(() => {
  if (endByClock() && visible.peek()) void renew();
}, LOOK_MS);
visible.subscribe((isVisible) => {
  if (!isVisible) return;
  endByClock();
  void renew();
});
onTold((what) => {
  turn++;
  if (what === "out" && session.value.is === "in") loadAnew();
  // A tab that nobody sees asks when it is seen.
  if (what === "in" && visible.value) void renew();
});

/** Whether the page is about to be loaded anew: then nobody is asked whether something would be lost. */
export const isOver = signal(false);

function loadAnew(): void {
  isOver.value = true;
  location.reload();
}

/** Begins the session, or goes on with it. */
function enter(now: Session): void {
  const before = session.value;
  if (before.is === "in") {
    const { caller, role, by } = before.session;
    if (now.caller !== caller || now.role !== role || now.by !== by) {
      loadAnew();
      return;
    }
  }
  // The daemon rounds down: until one second later it may go on.
  endsAt = now.seconds_left === null ? Number.POSITIVE_INFINITY : Date.now() + (now.seconds_left + 1) * 1000;
  session.value = { is: "in", session: now };
  hasEnded.value = false;
}

function end(): void {
  const before = session.value;
  if (before.is !== "in") return;
  // Only a token begins another session here. Who came in otherwise has to come in again.
  if (before.session.by === "session") hasEnded.value = true;
  else loadAnew();
}

/** Begins a session with a token, in all tabs of the browser. */
export async function login(token: string): Promise<void> {
  const { body } = await raw<Session>("POST", "/v1/session", { body: { token } });
  turn++;
  tell("in");
  enter(body);
}

/** Ends the session in all tabs of the browser, and everything that they know. */
export async function logout(): Promise<void> {
  try {
    await raw("DELETE", "/v1/session");
  } catch (error) {
    // Whom the daemon refuses has no session any more.
    if (!(error instanceof ApiError)) throw error;
  }
  tell("out");
  loadAnew();
}

const ORDER: Role[] = ["read", "operate", "admin"];

/** Whether the role permits what needs this one. A role that is not known permits nothing. */
export function can(role: Role): boolean {
  const state = session.value;
  return state.is === "in" && ORDER.indexOf(state.session.role) >= ORDER.indexOf(role);
}

/** Why the role does not permit it, in words; null if it does. */
export function lacks(role: Role): string | null {
  return can(role) ? null : `This needs the role ${role}.`;
}

/** The state of a button that somebody may not use, or that is of no use now, and why. */
export function against(reason: string | null): { disabled: boolean; title: string | undefined } {
  return { disabled: reason !== null, title: reason ?? undefined };
}
