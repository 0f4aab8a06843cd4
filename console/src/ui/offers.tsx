// Acts that a page offers, each with what it is for. One that would be refused is not offered: its reason stands in its place.
import { ask } from "../acts.ts";
import { words } from "../api/client.ts";
import { pageKey } from "../router.ts";
import { can, session } from "../state/session.ts";
import { toast } from "./announce.tsx";
import type { Act } from "./dialog.tsx";

export interface Offer {
  verb: string;
  about: string;
  /** Why it is not possible now, in words; null if it is. */
  reason: string | null;
  isDestructive?: boolean;
  /** The act to ask for, or what finds it out first; absent if it is never possible. */
  act?(): Act | Promise<Act>;
}

/** Asks for an act, which may have to be found out first: not if the page was left meanwhile. Why that fails is told in a toast. */
export async function askFor(act: () => Act | Promise<Act>): Promise<void> {
  const page = pageKey.peek();
  try {
    const found = await act();
    if (pageKey.peek() === page) ask(found);
  } catch (error) {
    toast(words(error), "error");
  }
}

export function Offers({ offers, label }: { offers: Offer[]; label: string }) {
  return (
    <ul class="offers" aria-label={label}>
      {offers.map((o) => (
        <li key={o.verb}>
          {o.reason === null && o.act ? (
            <button
              type="button"
              class={o.isDestructive ? "danger-plain" : undefined}
              onClick={() => o.act && void askFor(o.act)}
            >
              {o.verb}
            </button>
          ) : (
            <strong>{o.verb}</strong>
          )}
          <p>{o.reason ?? o.about}</p>
        </li>
      ))}
    </ul>
  );
}

/** Why a page has no acts for who looks at it; nothing if it has. */
export function NeedsAdmin({ what }: { what: string }) {
  const state = session.value;
  if (state.is !== "in" || can("admin")) return null;
  return (
    <p class="hint">
      Your role is <code>{state.session.role}</code>. {what} needs <code>admin</code>.
    </p>
  );
}
