// Settings of a catalog, by when a change takes effect. A change is checked by the daemon before it is offered.
//
// Invariant: what is sent is what was read, with the changes; if somebody else has changed the catalog, nothing is. Changes stay
// until they are applied or discarded.
import { useEffect, useState } from "preact/hooks";
import { ask, changeAct, keepsData, putCatalog } from "../acts.ts";
import type { Catalog, Store } from "../api/client.ts";
import { toml } from "../commands.ts";
import { useDryRun } from "../state/dry-run.ts";
import { clearEdits, type Draft, differing, editsOf, type Key } from "../state/edits.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { toast } from "../ui/announce.tsx";
import { plural } from "../ui/format.ts";
import { Command, Notice, Panel } from "../ui/parts.tsx";
import { hintOf } from "../ui/hints.ts";
import { aboutOf, type Effect, FIELDS, SpecField, shown, wrongText } from "../ui/spec-form.tsx";

const GROUPS: [Effect, string][] = [
  ["at once", "Changes apply at once, to running machines too"],
  ["at the next start", "Changes apply at the next start of each machine"],
  ["cannot be changed", "Cannot be changed"],
];

export function CatalogSettings({ catalog }: { catalog: Catalog }) {
  const stores = useList<Store>("/v1/stores");
  const edits = editsOf(catalog.name);
  const { wrong } = edits;
  const diff = differing(edits.changes.value, catalog.spec);
  const draft: Draft = { ...catalog.spec, ...diff };
  // Fields begin anew when all changes are discarded.
  const [round, setRound] = useState(0);
  const incorrect = wrongText(wrong.value);
  const keys = Object.keys(diff) as Key[];
  const isRedacted = (catalog.spec.redacted ?? []).length > 0;
  const isEditable = can("admin") && !isRedacted;
  const checked = useDryRun(
    keys.length && !incorrect
      ? JSON.stringify([catalog.name, catalog.revision, keys.map((key) => [key, diff[key] ?? null])])
      : null,
    async () => (await putCatalog(catalog, diff, true)).body,
  );
  const effective = checked && "answer" in checked ? checked.answer.effective : null;
  const change = (key: Key, value: unknown) => {
    edits.changes.value = differing({ ...edits.changes.peek(), [key]: value }, catalog.spec);
  };
  // What has been applied is no change any more, also if the catalog gets yet another value later.
  useEffect(() => {
    edits.changes.value = differing(edits.changes.peek(), catalog.spec);
  }, [catalog.name, catalog.revision]);
  // Who goes elsewhere is told that nothing is lost.
  useEffect(
    () => () => {
      const left = Object.keys(edits.changes.peek()).length;
      if (left)
        toast(`${plural(left, "changed setting")} of ${catalog.name} not applied yet: kept in Settings.`);
    },
    [catalog.name],
  );
  const discard = () => {
    clearEdits(edits);
    setRound((n) => n + 1);
    // The bar with the buttons goes, and the focus with it.
    document.getElementById("page-title")?.focus();
  };
  const effects = keys.map((key) => {
    const field = FIELDS.find((f) => f.key === key);
    const text = (v: unknown) => (field ? shown(field, v) || "not set" : String(v));
    const isHidden = key === "user_data";
    const isDefault = diff[key] == null && effective?.[key] != null;
    const then = `${text(diff[key] ?? effective?.[key])}${isDefault ? " (default)" : ""}`;
    return `${field?.title ?? key}: ${isHidden ? "changed" : `${text(catalog.spec[key])} becomes ${then}`}, ${aboutOf(key).effect}.`;
  });
  return (
    <>
      {isRedacted ? (
        <Notice>
          Your role may not read {catalog.spec.redacted?.join(" and ")}, so settings cannot be changed here.
        </Notice>
      ) : null}
      {GROUPS.map(([effect, title]) => (
        <Panel key={effect} title={title}>
          {effect === "at the next start" && keepsData(catalog.spec) && catalog.spec.type !== "dedicated" ? (
            <p class="hint">
              These machines keep their disks while they are off, so settings of the disk itself apply at the
              next reset of each machine. The page of a machine shows what waits.
            </p>
          ) : null}
          {isEditable && effect !== "cannot be changed" ? (
            <div class="fields">
              {FIELDS.filter((f) => aboutOf(f.key).effect === effect).map((f) => (
                <SpecField
                  key={`${f.key} ${round}`}
                  field={f}
                  draft={draft}
                  change={change}
                  wrong={wrong}
                  stores={(stores.data ?? []).map((s) => s.name)}
                />
              ))}
            </div>
          ) : (
            <dl class="facts">
              {FIELDS.filter((f) => aboutOf(f.key).effect === effect).map((f) => (
                <div key={f.key}>
                  <dt>{f.title}</dt>
                  <dd title={hintOf(f.key)}>
                    {shown(f, catalog.spec[f.key]) || <span class="muted">not set</span>}
                  </dd>
                </div>
              ))}
            </dl>
          )}
        </Panel>
      ))}
      <Panel title="As a file">
        <Command label="For spillway catalog apply" text={toml(catalog.name, catalog.spec)} />
      </Panel>
      {keys.length || incorrect ? (
        <div class="savebar" role="region" aria-label="Changes">
          <div>
            <strong>{plural(keys.length, "setting")} changed</strong>{" "}
            {incorrect ? (
              <span class="critical-text">{incorrect}</span>
            ) : checked === null ? (
              <span class="muted">The daemon checks it</span>
            ) : "error" in checked ? (
              <span class="critical-text">{checked.error}</span>
            ) : (
              checked.answer.warnings.map((w) => (
                <span key={w} class="warning-text">
                  {w}{" "}
                </span>
              ))
            )}
          </div>
          <div class="acts">
            <button type="button" onClick={discard}>
              Discard
            </button>
            <button
              type="button"
              class="primary"
              disabled={Boolean(incorrect) || checked === null || "error" in checked}
              onClick={() =>
                ask({
                  ...changeAct(catalog, diff, `Change ${catalog.name}?`, effects, effective),
                  after: discard,
                })
              }
            >
              Review and apply
            </button>
          </div>
        </div>
      ) : null}
    </>
  );
}
