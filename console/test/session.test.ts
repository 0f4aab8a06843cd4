// A session: what is known of it, when it is asked for again, and that nothing outlives it.
import { browser, hear, repeat } from "./dom.ts";
import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { raw } from "../src/api/client.ts";
import {
  begin,
  can,
  hasEnded,
  isOver,
  isSignedIn,
  login,
  logout,
  type Session,
  session,
} from "../src/state/session.ts";
import { visible } from "../src/state/visible.ts";
import { type Reply, transport } from "../src/transport.ts";

const settled = () => new Promise((done) => setImmediate(done));
const SESSION: Session = { caller: "ci", role: "operate", by: "session", seconds_left: 40_000 };
const problem = (status: number, detail: string, code = "x") => ({ status, body: { status, detail, code } });

/** What the daemon answers, by method and path. */
let answers: Record<string, { status: number; body: unknown }> = {};
let asked: string[] = [];
mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
beforeEach(() => {
  asked = [];
  browser.reloads = 0;
  browser.told = [];
  isOver.value = false;
  mock.timers.tick(60_000);
  transport.request = async ({ method, path }) => {
    asked.push(`${method} ${path}`);
    return { etag: null, ...(answers[`${method} ${path}`] ?? problem(404, "no such route", "not_found")) };
  };
});

// What is filled in must not hold the page back.
afterEach(() => assert.equal(isOver.value, browser.reloads > 0));

test("an answer that does not say who the caller is gives no rights", async () => {
  answers = {};
  const begun = begin();
  await settled();
  assert.deepEqual([session.value, can("read")], [{ is: "unknown", why: "no such route" }, false]);
  answers = { "GET /v1/session": { status: 200, body: { ...SESSION, role: "root" } } };
  mock.timers.tick(1000);
  await begun;
  assert.equal(can("read"), false, "a role that is not known permits nothing");
});

test("a refused request asks who the caller is; another caller begins anew", async () => {
  answers = {
    "GET /v1/session": { status: 200, body: SESSION },
    "POST /v1/host": problem(403, "needs admin"),
  };
  session.value = { is: "unknown", why: null };
  await begin();
  assert.deepEqual([can("operate"), can("admin")], [true, false]);
  mock.timers.tick(60_000);
  answers["GET /v1/session"] = { status: 200, body: { ...SESSION, seconds_left: 7 } };
  await assert.rejects(raw("POST", "/v1/host", { body: {} }), /needs admin/);
  await assert.rejects(raw("POST", "/v1/host", { body: {} }), /needs admin/);
  await settled();
  assert.deepEqual(session.value, { is: "in", session: { ...SESSION, seconds_left: 7 } });
  assert.equal(asked.filter((a) => a === "GET /v1/session").length, 2, "not once for each refusal");
  assert.equal(browser.reloads, 0);
  answers["GET /v1/session"] = { status: 200, body: { ...SESSION, role: "read" } };
  mock.timers.tick(60_000);
  visible.value = false;
  visible.value = true;
  await settled();
  assert.equal(browser.reloads, 1, "with another role, what was read under the first is dropped");
});

/** Another minute has passed, and a request is refused. */
async function isRefused(): Promise<void> {
  mock.timers.tick(60_000);
  await assert.rejects(raw("GET", "/v1/host"));
  await settled();
}
/** A session begins, and ends under its page. */
async function endsFor(of: Session): Promise<void> {
  answers = { "GET /v1/session": { status: 200, body: of }, "GET /v1/host": problem(401, "unknown") };
  session.value = { is: "unknown", why: null };
  hasEnded.value = false;
  await begin();
  await isRefused();
  assert.deepEqual([hasEnded.value, isSignedIn.value], [false, true], "the session goes on");
  answers["GET /v1/session"] = problem(503, "busy");
  await isRefused();
  assert.equal(hasEnded.value, false, "an error says nothing about the session");
  answers["GET /v1/session"] = problem(401, "unknown");
  await isRefused();
}

test("a session that ends leaves its page as it is, for the same caller", async () => {
  await endsFor(SESSION);
  assert.deepEqual([hasEnded.value, isSignedIn.value, browser.reloads], [true, false, 0]);
  assert.deepEqual([session.value, can("operate")], [{ is: "in", session: SESSION }, true], "the page stays");
  const before = asked.length;
  await isRefused();
  answers["POST /v1/session"] = problem(401, "this token is not known");
  await assert.rejects(login("wrong"), /not known/);
  await settled();
  assert.deepEqual(asked.slice(before), ["GET /v1/host", "POST /v1/session"], "it is not asked for again");
  assert.deepEqual([hasEnded.value, browser.told], [true, []]);
  answers["POST /v1/session"] = { status: 200, body: SESSION };
  await login("right");
  assert.deepEqual([hasEnded.value, isSignedIn.value, browser.reloads], [false, true, 0]);
  assert.deepEqual(browser.told, ["in"], "the other tabs have the same cookie");
});

test("another caller, or another role, begins anew", async () => {
  for (const change of [{ caller: "eve" }, { role: "read" }, { role: "admin" }, { by: "token" }]) {
    await endsFor(SESSION);
    browser.reloads = 0;
    answers["POST /v1/session"] = { status: 200, body: { ...SESSION, ...change } };
    await login("another");
    assert.deepEqual([browser.reloads, hasEnded.value], [1, true], "and what was there is never seen again");
  }
});

test("who came in without a token has to come in again", async () => {
  await endsFor({ ...SESSION, by: "socket" });
  assert.deepEqual([browser.reloads, hasEnded.value], [1, false]);
});

test("tabs go on when somebody has signed in in another one", async () => {
  await endsFor(SESSION);
  answers["GET /v1/session"] = { status: 200, body: SESSION };
  visible.value = false;
  const before = asked.length;
  hear("in");
  await settled();
  assert.deepEqual([asked.length, hasEnded.value], [before, true], "one that nobody sees asks nothing");
  visible.value = true;
  await settled();
  assert.deepEqual([hasEnded.value, browser.reloads], [false, 0]);
  // At once, also when it has just been asked for.
  await endsFor(SESSION);
  answers["GET /v1/session"] = { status: 200, body: SESSION };
  hear("in");
  await settled();
  assert.equal(hasEnded.value, false);
  // The login page, too.
  session.value = { is: "out" };
  hear("in");
  await settled();
  assert.deepEqual(session.value, { is: "in", session: SESSION });
  await endsFor(SESSION);
  answers["GET /v1/session"] = { status: 200, body: { ...SESSION, caller: "eve" } };
  hear("in");
  await settled();
  assert.equal(browser.reloads, 1);
  browser.reloads = 0;
  hear("out");
  assert.equal(browser.reloads, 1, "who signs out leaves nothing behind in any tab");
});

/** Answers come when a test gives them: these are the questions that wait for one, by method. */
function holdAnswers(): { method: string; give(reply: Omit<Reply, "etag">): Promise<unknown> }[] {
  const held: ReturnType<typeof holdAnswers> = [];
  transport.request = ({ method }) =>
    new Promise((done) => {
      const give = (reply: Omit<Reply, "etag">) => {
        done({ etag: null, ...reply });
        return settled();
      };
      held.push({ method, give });
    });
  return held;
}

test("a page is covered when its session is over by the clock, before the daemon answers", async () => {
  const lasting = (seconds_left: number) => ({ status: 200, body: { ...SESSION, seconds_left } });
  answers = { "GET /v1/session": lasting(100) };
  session.value = { is: "unknown", why: null };
  hasEnded.value = false;
  await begin();
  const held = holdAnswers();
  const covers: boolean[] = [];
  const stop = hasEnded.subscribe((isCovered) => covers.push(isCovered));
  mock.timers.tick(100_999);
  repeat();
  visible.value = false;
  visible.value = true;
  assert.deepEqual([covers, held.length], [[false], 1], "whoever only comes back sees no cover");
  await held.pop()?.give(lasting(0));
  assert.deepEqual(covers, [false]);
  mock.timers.tick(1000);
  repeat();
  assert.deepEqual([covers, held.length, isSignedIn.value], [[false, true], 1, false]);
  repeat();
  assert.equal(held.length, 1, "it is asked for once");
  await held.pop()?.give(problem(401, "unknown"));
  assert.deepEqual([session.value.is, browser.reloads, hasEnded.value], ["in", 0, true], "the page is kept");
  hear("in");
  await held.pop()?.give(lasting(50));
  assert.equal(hasEnded.value, false, "somebody has signed in in another tab");
  // Nobody sees the page, and nothing of it runs meanwhile.
  visible.value = false;
  mock.timers.tick(51_000);
  assert.equal(hasEnded.value, false);
  visible.value = true;
  assert.deepEqual([hasEnded.value, held.length], [true, 1]);
  await held.pop()?.give(lasting(50));
  assert.equal(hasEnded.value, false);
  // Nobody sees the page, which runs.
  visible.value = false;
  mock.timers.tick(51_000);
  repeat();
  assert.deepEqual([hasEnded.value, held.length], [true, 0], "nobody is asked for it");
  visible.value = true;
  assert.equal(held.length, 1);
  await held.pop()?.give(lasting(50));
  assert.equal(hasEnded.value, false);
  stop();
});

test("a page that is just opened hears that somebody has signed in, or out", async () => {
  session.value = { is: "unknown", why: null };
  hasEnded.value = false;
  const held = holdAnswers();
  const begun = begin();
  hear("in");
  await held.pop()?.give(problem(401, "unknown"));
  assert.deepEqual([session.value.is, held.length], ["unknown", 1], "it is asked for again");
  hear("out");
  await held.pop()?.give({ status: 200, body: SESSION });
  assert.deepEqual([session.value.is, held.length], ["unknown", 1]);
  await held.pop()?.give({ status: 200, body: { ...SESSION, caller: "eve" } });
  await begun;
  assert.deepEqual([session.value, held.length], [{ is: "in", session: { ...SESSION, caller: "eve" } }, 0]);
  assert.equal(browser.reloads, 0);
});

test("an answer that was asked for before somebody signed in does not end the session", async () => {
  await endsFor(SESSION);
  const late: ((reply: Reply) => void)[] = [];
  const { request } = transport;
  transport.request = (sent) =>
    sent.method === "GET" ? new Promise((done) => late.push(done)) : request(sent);
  hear("in");
  answers["POST /v1/session"] = { status: 200, body: SESSION };
  await login("right");
  late.pop()?.({ etag: null, ...problem(401, "unknown") });
  await settled();
  assert.equal(hasEnded.value, false);
});

test("who signs out leaves nothing behind, and is told if it was not possible", async () => {
  answers = { "DELETE /v1/session": { status: 200, body: {} } };
  await logout();
  assert.deepEqual([browser.reloads, browser.told], [1, ["out"]]);
  answers = { "DELETE /v1/session": problem(409, "the request belongs to no session") };
  await logout();
  assert.equal(browser.reloads, 2, "the session had ended before");
  answers = { "DELETE /v1/session": { status: 502, body: undefined } };
  await assert.rejects(logout(), /does not answer/);
  assert.equal(browser.reloads, 2);
});
