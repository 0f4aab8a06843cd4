// The button of an act on machines. It stays in its place when it is not possible, and says why.
import type { Keeping } from "../acts.ts";
import type { Schemas } from "../api/client.ts";
import { against, can, lacks } from "../state/session.ts";

type Action = Schemas["Action"];

/** Why somebody may not do this, in words; null if the role is enough. */
export function refusalOf(action: Action, isKeeping: Keeping): string | null {
  if (!can("operate")) return lacks("operate");
  if (action !== "reset" || isKeeping === false || can("admin")) return null;
  return isKeeping === null
    ? "Whether the machines keep data is not known yet. To discard kept data needs the role admin."
    : "The machines keep their data: to discard it needs the role admin.";
}

export function ActButton({
  action,
  isKeeping,
  suffix = "",
  reason = null,
  act,
}: {
  action: Action;
  isKeeping: Keeping;
  suffix?: string;
  /** Why it is not possible now, whoever asks; null if it is. */
  reason?: string | null;
  act(action: Action): void;
}) {
  return (
    <button type="button" {...against(reason ?? refusalOf(action, isKeeping))} onClick={() => act(action)}>
      {action[0]?.toUpperCase() + action.slice(1)}
      {suffix}
    </button>
  );
}
