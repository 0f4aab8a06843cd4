//! Curves of all machines, which show what other sizes of the RAM tier would have done. They are read from all disks at
//! the same time, and seldom. Owns the last answers.
//!
//! Invariant: for the curves of all machines, the last curve of a disk that does not answer is used; a disk that is not served any more is left out.

use super::one_disk::check_served;
use super::recent::RecentAnswers;
use super::{PATIENCE, answer, ask_all, connect};
use crate::error::HostError;
use crate::machines::run::MachineFolders;
use crate::machines::views::MachineReader;
use crate::machines::{View, blocking, disk};
use spillway_api::{CatalogCurve, CurveFigures, DiskCurve, ErrorCode, Name, Selector};
use spillway_control::Request;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long an answer is reused: a curve changes within hours, and the disk's worker pauses to compute it.
const FRESH: Duration = Duration::from_secs(30);

/// Disks whose curves are added for a catalog: more of them would hardly change it.
const MOST_DISKS: usize = 256;

/// Curves by machine, each with its catalog.
pub type CurvesByMachine = BTreeMap<Name, (Name, CurveFigures)>;

/// Collects the curves of machines' disks.
pub struct CurveCollector {
    reader: MachineReader,
    folders: MachineFolders,
    of_catalogs: RecentAnswers<Name, CatalogCurve>,
    /// Last answer, and its time.
    last: tokio::sync::Mutex<Option<(Instant, Arc<CurvesByMachine>)>>,
}

impl CurveCollector {
    /// Creates the collector of these machines.
    pub fn new(reader: MachineReader, folders: MachineFolders) -> CurveCollector {
        let of_catalogs = RecentAnswers::new(FRESH);
        CurveCollector { reader, folders, of_catalogs, last: tokio::sync::Mutex::default() }
    }

    /// Reads the curve of one machine from its disk.
    pub fn of(&self, name: &Name, goal: Option<f64>) -> Result<DiskCurve, HostError> {
        if goal.is_some_and(|goal| !(0.0..=1.0).contains(&goal)) {
            return Err(HostError::new(ErrorCode::Invalid, "a goal is a share: 0 to 1"));
        }
        let view = self.reader.view(name)?;
        check_served(&view)?;
        let answer = disk::ask(self.folders.of(name).path(), &Request::Curve { goal })?;
        serde_json::from_value(answer).map_err(|e| {
            let message = format!("{name}: its disk is of another version, whose curve cannot be read: {e}");
            HostError::new(ErrorCode::Unavailable, message)
        })
    }

    /// Returns the sum of the curves of a catalog's machines, at most about half a minute old.
    pub async fn of_catalog(&self, name: &Name) -> Result<Arc<CatalogCurve>, HostError> {
        self.of_catalogs.get(name.clone(), self.sum_of(name)).await
    }

    async fn sum_of(&self, name: &Name) -> Result<CatalogCurve, HostError> {
        let (reader, of) = (self.reader.clone(), name.clone());
        let selector = Selector { catalog: Some(of), ..Selector::default() };
        let mut views = blocking(move || reader.views(&selector)).await?;
        views.retain(has_curve);
        let machines = views.len();
        if machines == 0 {
            let message = format!("no machine of {name} is served that has a RAM tier: start one first");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        let until = Instant::now() + PATIENCE;
        let asked = ask_all(&self.folders, views.iter().take(MOST_DISKS), until, ask).await;
        let curves: Vec<DiskCurve> = asked.into_iter().map(|(_, curve)| curve).collect();
        CatalogCurve::sum(&curves, machines).ok_or_else(|| {
            let message = format!("no disk of {name} has answered in {} ms", PATIENCE.as_millis());
            HostError::new(ErrorCode::Unavailable, message)
        })
    }

    /// Returns the curves of all machines that have a RAM tier, at most about half a minute old.
    pub async fn all(&self) -> Result<Arc<CurvesByMachine>, HostError> {
        let mut last = self.last.lock().await;
        if let Some((at, curves)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(curves));
        }
        let reader = self.reader.clone();
        let views = blocking(move || reader.views(&Selector::default())).await?;
        let served: Vec<&View> = views.iter().filter(|view| has_curve(view)).collect();
        let until = Instant::now() + PATIENCE;
        let mut curves = CurvesByMachine::new();
        let known = last.as_ref().map(|(_, known)| known);
        for view in &served {
            if let Some(of) = known.and_then(|known| known.get(&view.machine.name)) {
                curves.insert(view.machine.name.clone(), of.clone());
            }
        }
        for (view, curve) in ask_all(&self.folders, served.into_iter(), until, ask).await {
            let figures = CurveFigures::from(&curve);
            curves.insert(view.machine.name.clone(), (view.machine.catalog.clone(), figures));
        }
        let curves = Arc::new(curves);
        *last = Some((Instant::now(), Arc::clone(&curves)));
        Ok(curves)
    }
}

fn has_curve(view: &View) -> bool {
    view.status.run.as_ref().is_some_and(|run| run.disk_pid.is_some() && run.ram_bytes.is_some())
}

async fn ask(folder: PathBuf) -> io::Result<DiskCurve> {
    answer(&mut connect(&folder).await?, &Request::Curve { goal: None }).await
}
