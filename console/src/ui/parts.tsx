// Small parts that pages are made of: panels, badges, key-value lists, empty and failed states, tabs.
import type { ComponentChildren } from "preact";
import { useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import { words } from "../api/client.ts";
import { shownHost } from "../shown-host.ts";
import { href, queryValue, route, setQuery } from "../router.ts";

type Children = { children?: ComponentChildren };

export type Tone = "good" | "note" | "warning" | "critical" | "plain";

/** A word with a colour. The word alone says it, too. */
export function Badge({ tone = "plain", children }: Children & { tone?: Tone }) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

/** The keyboard reaches what is wider than its place, so that it can be scrolled; nothing else becomes a stop of Tab. */
function useScrollable() {
  const ref = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const body = ref.current;
    if (!body) return;
    const look = () => {
      if (body.scrollWidth > body.clientWidth) body.tabIndex = 0;
      else body.removeAttribute("tabindex");
    };
    // What comes into it later makes it higher.
    const observer = new ResizeObserver(look);
    observer.observe(body);
    if (body.firstElementChild) observer.observe(body.firstElementChild);
    return () => observer.disconnect();
  }, []);
  return ref;
}

export function Panel({
  title,
  aside,
  children,
  flush,
}: Children & { title?: string; aside?: ComponentChildren; flush?: boolean }) {
  const id = useId();
  const body = useScrollable();
  return (
    <section class={`panel${flush ? " flush" : ""}`} {...(title ? { "aria-labelledby": id } : {})}>
      {title ? (
        <header class="panel-head">
          <h2 id={id}>{title}</h2>
          {aside ? <div class="aside">{aside}</div> : null}
        </header>
      ) : null}
      <div class="panel-body" ref={body}>
        {children}
      </div>
    </section>
  );
}

/** The head of a page: its only h1, what it is about, and its acts. */
export function PageHead({
  title,
  crumbs,
  about,
  acts,
}: {
  title: string;
  crumbs?: { text: string; to: string[] }[];
  about?: ComponentChildren;
  acts?: ComponentChildren;
}) {
  return (
    <header class="page-head">
      <div>
        {crumbs ? (
          <nav class="crumbs" aria-label="Path">
            {crumbs.map((c) => (
              <a key={c.text} href={href(c.to)}>
                {c.text}
              </a>
            ))}
          </nav>
        ) : null}
        <h1 id="page-title" tabIndex={-1}>
          {title}
        </h1>
        {about ? <div class="about">{about}</div> : null}
      </div>
      {acts ? <div class="acts">{acts}</div> : null}
    </header>
  );
}

export function Facts({ items }: { items: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {items.map(([key, value]) => (
        <div key={key}>
          <dt>{key}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Empty({ children }: Children) {
  return <div class="empty">{children}</div>;
}

/** What stands where an object would be, while it is read or could not be. */
export function Pending({ error, what }: { error: Error | null; what: string }) {
  if (!error) return <div class="empty loading">Loading {what}</div>;
  return (
    <div class="notice critical" role="alert">
      <strong>Cannot read {what}.</strong> {words(error)}
    </div>
  );
}

export function Notice({ tone = "note", children }: Children & { tone?: Tone }) {
  return <div class={`notice ${tone}`}>{children}</div>;
}

/** Longer commands, such as those with the names of many machines, are scrolled. */
const LONG = 1000;

/** A command that can be selected with one click and copied. */
export function Command({ text: given, label = "The same as a command" }: { text: string; label?: string }) {
  const text = shownHost ? given.replace(/^spillway (?!fleet|stats)/gm, `$&--host ${shownHost} `) : given;
  const ref = useRef<HTMLButtonElement>(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      if (ref.current) ref.current.textContent = "Copied";
    } catch {
      if (ref.current) ref.current.textContent = "Select and copy it";
    }
  };
  return (
    <figure class="command">
      <figcaption>
        {label}
        <button type="button" class="plain" ref={ref} onClick={() => void copy()}>
          Copy
        </button>
      </figcaption>
      <pre {...(text.length > LONG ? { class: "long", tabIndex: 0 } : {})}>{text}</pre>
    </figure>
  );
}

export interface Tab {
  key: string;
  title: string;
  note?: ComponentChildren;
}

/** Tabs of a page. The chosen one is in the URL. */
export function Tabs({ tabs, label }: { tabs: Tab[]; label: string }) {
  const chosen = queryValue("tab") ?? tabs[0]?.key;
  return (
    <nav class="tabs" aria-label={label}>
      {tabs.map((tab) => (
        <a
          key={tab.key}
          href={href(route.value.parts, { tab: tab.key === tabs[0]?.key ? undefined : tab.key })}
          aria-current={tab.key === chosen ? "page" : undefined}
        >
          {tab.title}
          {tab.note ? <span class="tab-note">{tab.note}</span> : null}
        </a>
      ))}
    </nav>
  );
}

/** A search field whose text is in the URL. */
export function Filter({ label, name = "filter" }: { label: string; name?: string }) {
  return (
    <label class="filter">
      <span class="sr-only">{label}</span>
      <input
        type="search"
        placeholder={label}
        value={queryValue(name) ?? ""}
        onInput={(e) => setQuery({ [name]: e.currentTarget.value || undefined })}
      />
    </label>
  );
}

/** A native choice whose value is in the URL; "" is the first one. */
export function Choice({
  label,
  name,
  options,
}: {
  label: string;
  name: string;
  options: [string, string][];
}) {
  return (
    <label class="choice">
      <span>{label}</span>
      <select
        value={queryValue(name) ?? ""}
        onChange={(e) => setQuery({ [name]: e.currentTarget.value || undefined })}
      >
        {options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

/** The width of an element in pixels, for pictures whose text must not be scaled. */
export function useWidth<E extends Element>(otherwise: number) {
  const ref = useRef<E>(null);
  const [width, setWidth] = useState(otherwise);
  useLayoutEffect(() => {
    const el = ref.current;
    if (!el) return;
    const measure = () => setWidth((was) => (el.clientWidth > 0 ? Math.round(el.clientWidth) : was));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(el);
    return () => observer.disconnect();
  }, []);
  return [ref, width] as const;
}

/** Text of the API's description: what stands between backticks is code. */
export function Prose({ text }: { text: string }) {
  // The parts of a text never change their order
  return <>{text.split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part))}</>;
}

/** A field with its label. The label is for the control, so that its name is the label's text alone. */
export function Labelled({
  label,
  hint,
  children,
}: {
  label: string;
  hint?: string;
  children: (id: string) => ComponentChildren;
}) {
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {children(id)}
      {hint ? (
        <p class="hint" id={`${id}-hint`}>
          {hint}
        </p>
      ) : null}
    </div>
  );
}
