// The frame around every page: navigation, who is signed in, how old the figures are, and what is said when the daemon is
// away.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { words } from "../api/client.ts";
import { href, pageKey, route } from "../router.ts";
import { shownHost } from "../shown-host.ts";
import { following } from "../state/events.ts";
import { figuresAt, STALE_MS } from "../state/figures.ts";
import { fleetPages } from "../state/fleet.ts";
import { awayAdvice, awaySince, logout, session } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { toast } from "./announce.tsx";
import { clock, duration } from "./format.ts";
import { choose, type Theme, theme } from "./theme.ts";

const PLACES: [string, string][] = [
  ["", "Host"],
  ["catalogs", "Catalogs"],
  ["machines", "Machines"],
  ["images", "Images"],
  ["stores", "Stores and registries"],
  ["operations", "Operations"],
  ["events", "Events"],
  ["reports", "Reports"],
  ["about", "About"],
];
/** Figures that are older than this are said to be. */
const LIVE_SECONDS = 2.5;

function Freshness() {
  const at = figuresAt.value;
  // Looked at each second.
  const age = at === null ? null : Math.max(0, (Math.max(now.value, Date.now()) - at) / 1000);
  const away = awaySince.value;
  const isStale = age !== null && age * 1000 > STALE_MS;
  const text =
    away !== null
      ? "No answer"
      : age === null
        ? "No figures yet"
        : age > LIVE_SECONDS
          ? `Figures are ${duration(age)} old`
          : "Figures are live";
  const how = {
    stream: "events follow",
    polling: "events every 5 s",
    connecting: "events connect",
    paused: "events paused",
  }[following.value];
  return (
    <p class={`freshness${away !== null || isStale ? " stale" : ""}`}>
      <span class="dot" aria-hidden="true" />
      {text}, {how}
    </p>
  );
}

async function signOut(): Promise<void> {
  await logout().catch((error) => toast(`You are still signed in. ${words(error)}`, "error"));
}

export function Shell({ children }: { children: ComponentChildren }) {
  const [isOpen, setOpen] = useState(false);
  const page = route.value.parts[0] ?? "";
  const key = pageKey.value;
  // The menu closes on each change of page
  useEffect(() => setOpen(false), [key]);
  const state = session.value;
  const away = awaySince.value;
  const fleet = fleetPages.value;
  return (
    <div class="shell">
      <button type="button" class="skip" onClick={() => document.getElementById("page-title")?.focus()}>
        Skip to the content
      </button>
      <header class="side">
        <div class="brand">
          <a href={href([])}>
            <svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true">
              <rect class="fill ram" x="1" y="1.5" width="14" height="5" rx="1" />
              <rect class="fill overflow" x="1" y="7.5" width="9" height="3" rx="1" />
              <rect class="fill base" x="1" y="11.5" width="14" height="3" rx="1" />
            </svg>
            {shownHost ?? "Spillway"}
          </a>
          <button
            type="button"
            class="menu"
            aria-expanded={isOpen}
            aria-controls="places"
            onClick={() => setOpen(!isOpen)}
          >
            Menu
          </button>
        </div>
        <div id="places" class={`places${isOpen ? " open" : ""}`}>
          <nav aria-label="Main">
            {fleet ? <fleet.FleetPlaces /> : null}
            {PLACES.map(([to, title]) => (
              <a key={to} href={href(to ? [to] : [])} aria-current={to === page ? "page" : undefined}>
                {title}
              </a>
            ))}
          </nav>
          <div class="side-foot">
            <Freshness />
            {state.is === "in" && state.session.caller ? (
              <p>
                {state.session.caller} <span class="muted">({state.session.role})</span>
              </p>
            ) : null}
            {state.is === "in" && state.session.by === "session" ? (
              <button type="button" class="plain" onClick={() => void signOut()}>
                Sign out
              </button>
            ) : null}
            <label class="choice">
              <span>Colours</span>
              <select value={theme.value} onChange={(e) => choose(e.currentTarget.value as Theme)}>
                <option value="system">as the system</option>
                <option value="light">light</option>
                <option value="dark">dark</option>
              </select>
            </label>
          </div>
        </div>
      </header>
      <main id="main">
        {away !== null ? (
          <div class="notice critical away" role="alert">
            <strong>The daemon has not answered since {clock(away).slice(11)}.</strong> {awayAdvice.value}{" "}
            Machines are not affected: they run without it. What you see is from before. The page tries again
            by itself.
          </div>
        ) : null}
        {children}
      </main>
    </div>
  );
}
