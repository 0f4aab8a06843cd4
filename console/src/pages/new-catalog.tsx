// The wizard for a new catalog. Each step is checked by the daemon itself, with a dry run of what would be sent.
//
// Invariant: a field that nobody filled in is not sent, so every default is the daemon's.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { api, type Catalog, type CatalogSpec, words } from "../api/client.ts";
import { href, navigate, pageKey, queryValue } from "../router.ts";
import { useDryRun, type Verdict } from "../state/dry-run.ts";
import { clearDraft, type Draft, draft, draftKey, type Key, name, wrong } from "../state/edits.ts";
import { refresh } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { announce, toast } from "../ui/announce.tsx";
import { Notice, PageHead } from "../ui/parts.tsx";
import { wrongText } from "../ui/spec-form.tsx";
import { ReviewStep } from "./new-catalog-review.tsx";
import { CacheStep, FieldsStep, ImageStep, MachinesStep } from "./new-catalog-steps.tsx";

const STEPS = [
  ["image", "Image"],
  ["machines", "Machines"],
  ["cache", "Write cache"],
  ["identity", "Identity"],
  ["review", "Review"],
] as const;
type Step = (typeof STEPS)[number][0];

type Checked = Verdict<Catalog> | null;

/** What the daemon says of the draft. */
function useDraftVerdict(): Checked {
  const body = { name: name.value, spec: draft.value as CatalogSpec };
  const isReady = body.name !== "" && Boolean(body.spec.image) && can("admin");
  return useDryRun(isReady ? JSON.stringify(body) : null, async (signal) => {
    const answer = await api.post("/v1/catalogs", { query: { dry_run: true }, body, signal });
    return answer.body;
  });
}

/** The settings that a draft has not set. */
function without(spec: CatalogSpec, of: Draft): Draft {
  return Object.fromEntries(Object.entries(spec).filter(([key]) => of[key as Key] === undefined));
}

export function NewCatalogPage() {
  const step = (STEPS.find(([key]) => key === queryValue("step"))?.[0] ?? "image") as Step;
  const at = STEPS.findIndex(([key]) => key === step);
  const checked = useDraftVerdict();
  const effective = checked && "answer" in checked ? checked.answer.effective : null;
  // Sums over the fields stay while the next verdict is awaited: what the daemon's defaults were for the last draft still counts.
  const defaults = useRef<Draft>({});
  if (effective) defaults.current = without(effective, draft.value);
  const next = STEPS[at + 1]?.[0];
  const before = STEPS[at - 1]?.[0];
  const isReady = name.value !== "" && Boolean(draft.value.image);
  const incorrect = wrongText(wrong.value);
  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) document.getElementById("page-title")?.focus();
    isFirst.current = false;
    announce(`Step ${at + 1} of ${STEPS.length}: ${STEPS[at]?.[1]}`);
  }, [at]);
  if (!can("admin")) {
    return (
      <>
        <PageHead title="New catalog" crumbs={[{ text: "Catalogs", to: ["catalogs"] }]} />
        <Notice>Making a catalog needs the role admin.</Notice>
      </>
    );
  }
  return (
    <>
      <PageHead title="New catalog" crumbs={[{ text: "Catalogs", to: ["catalogs"] }]} />
      <nav class="steps" aria-label="Steps">
        <ol>
          {STEPS.map(([key, title], i) => (
            <li key={key}>
              <a
                href={href(["catalogs", "new"], { step: i ? key : undefined })}
                aria-current={key === step ? "step" : undefined}
              >
                <span class="step-number">{i + 1}</span> {title}
              </a>
            </li>
          ))}
        </ol>
      </nav>
      <div class="wizard">
        {step === "image" ? <ImageStep /> : null}
        {step === "machines" ? <MachinesStep /> : null}
        {step === "cache" ? <CacheStep defaults={defaults.current} /> : null}
        {step === "identity" ? (
          <FieldsStep title="Who may log in, and what cloud-init does" group="identity" />
        ) : null}
        {step === "review" ? <ReviewStep effective={effective} /> : null}
      </div>
      <div class="verdict" aria-live="polite">
        {incorrect ? (
          <Notice tone="critical">{incorrect}</Notice>
        ) : !isReady ? (
          <Notice>The catalog needs a name and an image; then the daemon checks each change.</Notice>
        ) : checked === null ? (
          <Notice>The daemon checks it.</Notice>
        ) : "error" in checked ? (
          <Notice tone="critical">{checked.error}</Notice>
        ) : (
          <>
            <Notice tone="good">The daemon accepts these settings.</Notice>
            {checked.answer.warnings.map((w) => (
              <Notice key={w} tone="warning">
                {w}
              </Notice>
            ))}
          </>
        )}
      </div>
      <div class="acts wizard-acts">
        {before ? (
          <a
            class="button"
            href={href(["catalogs", "new"], { step: before === "image" ? undefined : before })}
          >
            Back
          </a>
        ) : null}
        {next ? (
          <a class="button primary" href={href(["catalogs", "new"], { step: next })}>
            Continue
          </a>
        ) : (
          <CreateButton isReady={!incorrect && checked !== null && "answer" in checked} />
        )}
      </div>
    </>
  );
}

function CreateButton({ isReady }: { isReady: boolean }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const button = useRef<HTMLButtonElement>(null);
  // It was disabled meanwhile, and has lost the focus.
  useLayoutEffect(() => {
    if (error !== null) button.current?.focus();
  }, [error]);
  const create = async () => {
    const key = draftKey();
    const made = name.value;
    const spec = draft.value;
    const page = pageKey.peek();
    setBusy(true);
    setError(null);
    try {
      await api.post("/v1/catalogs", { key, body: { name: made, spec: spec as CatalogSpec } });
      toast(`The catalog ${made} is made.`);
      refresh();
      // Who has gone elsewhere meanwhile, or fills in another catalog, stays there.
      if (draftKey() === key) clearDraft();
      else return setBusy(false);
      if (pageKey.peek() === page) navigate(["catalogs", made]);
    } catch (failure) {
      setError(words(failure));
      setBusy(false);
    }
  };
  return (
    <>
      <button
        ref={button}
        type="button"
        class="primary"
        disabled={!isReady || busy}
        onClick={() => void create()}
      >
        {busy ? "Working" : "Create the catalog"}
      </button>
      <div aria-live="polite">{error ? <Notice tone="critical">{error}</Notice> : null}</div>
    </>
  );
}
