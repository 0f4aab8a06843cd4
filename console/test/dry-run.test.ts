import "./dom.ts";
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { ApiError, Unreachable } from "../src/api/client.ts";
import about from "../src/api/spec-fields.json";
import { DryRun } from "../src/state/dry-run.ts";
import type { Key } from "../src/state/edits.ts";
import { hasEnded, session } from "../src/state/session.ts";
import { visible } from "../src/state/visible.ts";
import { aboutOf } from "../src/ui/spec-form.tsx";

session.value = { is: "in", session: { caller: "a", role: "admin", by: "session", seconds_left: 9 } };

/** Lets what has been answered be taken. */
const settle = async () => {
  for (let i = 0; i < 10; i++) await Promise.resolve();
};

function timers(run: () => Promise<void>) {
  return async () => {
    mock.timers.enable({ apis: ["setTimeout"] });
    try {
      await run();
    } finally {
      mock.timers.reset();
    }
  };
}

test(
  "a verdict stands only beside the change that it is about",
  timers(async () => {
    const dryRun = new DryRun<string>();
    dryRun.ask("a", () => Promise.resolve("of a"));
    assert.equal(dryRun.of("a"), null, "nothing is known before the answer");
    mock.timers.tick(250);
    await settle();
    assert.deepEqual(dryRun.of("a"), { answer: "of a" });
    assert.equal(dryRun.of("b"), null);
    assert.equal(dryRun.of(null), null);
    dryRun.ask("a", () => Promise.reject(new Error("no")));
    assert.equal(dryRun.of("a"), null, "it is asked anew");
    mock.timers.tick(250);
    await settle();
    assert.deepEqual(dryRun.of("a"), { error: "no" });
  }),
);

test(
  "an answer that comes after another change is dropped",
  timers(async () => {
    const dryRun = new DryRun<string>();
    let answer = (_: string) => {};
    let signal: AbortSignal | undefined;
    dryRun.ask("a", (of) => {
      signal = of;
      return new Promise((done) => {
        answer = done;
      });
    });
    mock.timers.tick(250);
    dryRun.ask("b", () => Promise.resolve("of b"));
    mock.timers.tick(250);
    await settle();
    answer("of a");
    await settle();
    assert.equal(signal?.aborted, true);
    assert.equal(dryRun.of("a"), null);
    assert.deepEqual(dryRun.of("b"), { answer: "of b" });
  }),
);

test(
  "nothing is asked while nobody sees the page, and a daemon that is away is asked again",
  timers(async () => {
    const dryRun = new DryRun<string>();
    let asked = 0;
    visible.value = false;
    dryRun.ask("a", () => {
      asked++;
      return asked === 1 ? Promise.reject(new Unreachable("away")) : Promise.resolve("there");
    });
    mock.timers.tick(250);
    await settle();
    assert.equal(asked, 0);
    visible.value = true;
    mock.timers.tick(3000);
    await settle();
    assert.deepEqual(dryRun.of("a"), { error: "away" });
    mock.timers.tick(3000);
    await settle();
    assert.deepEqual([asked, dryRun.of("a")], [2, { answer: "there" }]);
    dryRun.ask("b", () => {
      asked++;
      return Promise.resolve("of b");
    });
    dryRun.cancel();
    mock.timers.tick(10_000);
    await settle();
    assert.deepEqual([asked, dryRun.of("b")], [2, null], "what was ended asks no more");
  }),
);

test(
  "what was asked without a session is asked again when there is one",
  timers(async () => {
    const dryRun = new DryRun<string>();
    const refusal = {
      type: "",
      title: "",
      status: 401,
      detail: "who is it?",
      code: "unauthenticated" as const,
    };
    let asked = 0;
    dryRun.ask("a", () => {
      asked++;
      return asked === 1 ? Promise.reject(new ApiError(refusal)) : Promise.resolve("of a");
    });
    mock.timers.tick(250);
    await settle();
    assert.deepEqual(dryRun.of("a"), { error: "who is it?" });
    hasEnded.value = true;
    mock.timers.tick(3000);
    mock.timers.tick(3000);
    await settle();
    assert.equal(asked, 1);
    hasEnded.value = false;
    mock.timers.tick(3000);
    await settle();
    assert.deepEqual(dryRun.of("a"), { answer: "of a" });
  }),
);

test("each setting says when it takes effect, in the words of the settings page", () => {
  const effects = new Set((Object.keys(about) as Key[]).map((key) => aboutOf(key).effect));
  assert.deepEqual([...effects].sort(), ["at once", "at the next start", "cannot be changed"]);
});
