// What the daemon says of a change that is not made yet.
//
// Invariant: a verdict is shown only beside the very change that it is about. While nobody sees the page, or its session has ended,
// nothing is asked.
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { Unreachable, words } from "../api/client.ts";
import { isSignedIn, isUnauthenticated } from "./session.ts";
import { visible } from "./visible.ts";

export type Verdict<T> = { answer: T } | { error: string };

/** Pause after a change, so that not each letter that is typed is a request. */
const SETTLE_MS = 250;
/** Pause before a daemon is asked again that did not answer, or did not know who asks. */
const AGAIN_MS = 3000;

export class DryRun<T> {
  readonly #last = signal<{ key: string; verdict: Verdict<T> } | null>(null);
  #timer: ReturnType<typeof setTimeout> | undefined;
  #abort: AbortController | undefined;

  /** The verdict about the change with this key; null while there is none. */
  of(key: string | null): Verdict<T> | null {
    const last = this.#last.value;
    return last?.key === key ? last.verdict : null;
  }

  /** Asks about a change, in place of the last one. */
  ask(key: string, send: (signal: AbortSignal) => Promise<T>): void {
    this.cancel();
    this.#last.value = null;
    const abort = new AbortController();
    this.#abort = abort;
    const run = async () => {
      if (!visible.peek() || !isSignedIn.peek()) return this.#later(run);
      try {
        const answer = await send(abort.signal);
        if (!abort.signal.aborted) this.#last.value = { key, verdict: { answer } };
      } catch (error) {
        if (abort.signal.aborted) return;
        this.#last.value = { key, verdict: { error: words(error) } };
        if (error instanceof Unreachable || isUnauthenticated(error)) this.#later(run);
      }
    };
    this.#timer = setTimeout(() => void run(), SETTLE_MS);
  }

  #later(run: () => Promise<void>): void {
    this.#timer = setTimeout(() => void run(), AGAIN_MS);
  }

  /** Ends what is under way. */
  cancel(): void {
    clearTimeout(this.#timer);
    this.#abort?.abort();
  }
}

/**
 * The daemon's verdict about a change; null while it is not known. The key stands for everything that is sent; null: there is
 * nothing to ask.
 */
export function useDryRun<T>(
  key: string | null,
  send: (signal: AbortSignal) => Promise<T>,
): Verdict<T> | null {
  const [dryRun] = useState(() => new DryRun<T>());
  // The key stands for what is sent
  useEffect(() => {
    if (key !== null) dryRun.ask(key, send);
    return () => dryRun.cancel();
  }, [key]);
  return dryRun.of(key);
}
