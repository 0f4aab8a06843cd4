// A session: what is known of it, when it is asked for again, and that nothing outlives it.
import { browser } from "./dom.ts";
import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { raw } from "../src/api/client.ts";
import { begin, can, isOver, logout, type Session, session } from "../src/state/session.ts";
import { visible } from "../src/state/visible.ts";
import { transport } from "../src/transport.ts";

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
  browser.state = null;
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

test("at the end of a session the page is loaded anew, and knows why", async () => {
  answers = { "GET /v1/session": { status: 200, body: SESSION }, "GET /v1/host": problem(401, "unknown") };
  await begin();
  mock.timers.tick(60_000);
  await assert.rejects(raw("GET", "/v1/host"));
  await settled();
  assert.equal(browser.reloads, 0, "the session goes on");
  answers["GET /v1/session"] = problem(503, "busy");
  mock.timers.tick(60_000);
  await assert.rejects(raw("GET", "/v1/host"));
  await settled();
  assert.equal(browser.reloads, 0, "an error says nothing about the session");
  answers["GET /v1/session"] = problem(401, "unknown");
  mock.timers.tick(60_000);
  await assert.rejects(raw("GET", "/v1/host"));
  await settled();
  assert.equal(browser.reloads, 1);
  await begin();
  assert.deepEqual(session.value, { is: "out", why: "ended" });
  browser.state = null;
  await begin();
  assert.deepEqual(session.value, { is: "out", why: "never" });
});

test("who signs out leaves nothing behind, and is told if it was not possible", async () => {
  answers = { "DELETE /v1/session": { status: 200, body: {} } };
  await logout();
  assert.equal(browser.reloads, 1);
  answers = { "DELETE /v1/session": problem(409, "the request belongs to no session") };
  await logout();
  assert.equal(browser.reloads, 2, "the session had ended before");
  answers = { "DELETE /v1/session": { status: 502, body: undefined } };
  await assert.rejects(logout(), /does not answer/);
  assert.equal(browser.reloads, 2);
});
