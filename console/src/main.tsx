// The console's entry: starts what lives as long as the page, and chooses a page by the route.
import { render } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { AboutPage } from "./pages/about.tsx";
import { CatalogPage } from "./pages/catalog.tsx";
import { CatalogsPage } from "./pages/catalogs.tsx";
import { EventsPage } from "./pages/events.tsx";
import { HostPage } from "./pages/host.tsx";
import { ImagePage } from "./pages/image.tsx";
import { ImagesPage } from "./pages/images.tsx";
import { LoginPage, SignInAgain } from "./pages/login.tsx";
import { MachinePage } from "./pages/machine.tsx";
import { MachinesPage } from "./pages/machines.tsx";
import { NewCatalogPage } from "./pages/new-catalog.tsx";
import { OperationsPage } from "./pages/operations.tsx";
import { ReportPage, ReportsPage } from "./pages/reports.tsx";
import { StoresPage } from "./pages/stores.tsx";
import { href, pageKey, route } from "./router.ts";
import { shownHost } from "./shown-host.ts";
import { startEvents } from "./state/events.ts";
import { startFigures } from "./state/figures.ts";
import { fleetPages, startFleet } from "./state/fleet.ts";
import { begin, hasEnded, session } from "./state/session.ts";
import { Announcer, announce } from "./ui/announce.tsx";
import { ActDialog } from "./ui/dialog.tsx";
import { Notice, PageHead } from "./ui/parts.tsx";
import { Shell } from "./ui/shell.tsx";
import { StaleNotice } from "./ui/stale.tsx";
import "./style/app.css";

function Page() {
  const [page, name] = route.value.parts;
  switch (page) {
    case undefined:
      return <HostPage />;
    case "catalogs":
      if (name === "new") return <NewCatalogPage />;
      return name ? <CatalogPage key={name} name={name} /> : <CatalogsPage />;
    case "machines":
      return name ? <MachinePage key={name} name={name} /> : <MachinesPage />;
    case "images":
      return name ? <ImagePage key={name} name={name} /> : <ImagesPage />;
    case "operations":
      return <OperationsPage />;
    case "reports":
      return name ? <ReportPage key={name} name={name} /> : <ReportsPage />;
    case "stores":
      return <StoresPage />;
    case "events":
      return <EventsPage />;
    case "fleet":
    case "fleet-catalogs": {
      const pages = fleetPages.value;
      return pages ? (
        <pages.FleetPage />
      ) : (
        <PageHead title="Fleet" about="Only hosts of a fleet have this page." />
      );
    }
    case "about":
      return <AboutPage />;
    default:
      return (
        <>
          <PageHead title="There is no such page" />
          <p>
            <a href={href([])}>Go to the host</a>
          </p>
        </>
      );
  }
}

/** Gives the focus to the title of a new page, and says it. The page after signing in is one, too. */
function useRouteFocus() {
  const isFirst = useRef(true);
  const key = pageKey.value;
  const { is } = session.value;
  const isAsked = is === "out" || hasEnded.value;
  useEffect(() => {
    const text = document.getElementById("page-title")?.textContent ?? "";
    if (is !== "unknown") document.title = `${isAsked ? "Sign in" : text} - ${shownHost ?? "Spillway"}`;
  }, [key, is, isAsked]);
  // Runs once for each page
  useEffect(() => {
    if (is === "unknown") return;
    const title = document.getElementById("page-title");
    const text = title?.textContent ?? "";
    if (isFirst.current) {
      isFirst.current = false;
      return;
    }
    scrollTo(0, 0);
    title?.focus({ preventScroll: true });
    announce(text);
  }, [key, is]);
}

function App() {
  const state = session.value;
  useRouteFocus();
  if (state.is === "out") {
    return (
      <>
        <LoginPage />
        <Announcer />
      </>
    );
  }
  return (
    <>
      <Shell>
        {state.is === "in" ? (
          <>
            <StaleNotice />
            <Page />
          </>
        ) : state.why ? (
          <>
            <PageHead title="The daemon does not say who you are" />
            <Notice tone="critical">{state.why} The page tries again by itself.</Notice>
          </>
        ) : (
          <>
            <PageHead title="Spillway" />
            <div class="empty loading">Asking the daemon who you are</div>
          </>
        )}
      </Shell>
      <ActDialog />
      <SignInAgain />
      <Announcer />
    </>
  );
}

const root = document.getElementById("app");
if (root) {
  render(<App />, root);
  startFigures();
  startEvents();
  startFleet();
  void begin();
}
