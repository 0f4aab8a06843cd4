//! Checks of image versions: how many run at the same time, and their results. Owns the results, by the digest of the
//! checked content.
//!
//! Invariant: a content is checked once, however often and by however many clients the check is requested, and whether
//! they wait for its end; waiting occupies no thread.

use super::check::{self, CheckedVersion};
use super::files::VersionFiles;
use super::streamed::check_whole;
use super::{BootChoice, Images};
use crate::error::HostError;
use spillway_api::{
    Catalog, CatalogKind, ErrorCode, Finding, FindingKind, Firmware, GuestSystem, Image, ImageCheck,
    ImageRef, ImageVersion, Name,
};
use std::collections::VecDeque;
use std::fs::File;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

/// Longest time of a check. The client waits for it.
const CHECK: Duration = Duration::from_secs(40);
/// Longest wait for a result, including the turns of others: clients give up after a minute without a response.
const PATIENCE: Duration = Duration::from_secs(50);
/// Number of checks that run at the same time.
const AT_A_TIME: usize = 2;
/// Number of results that are kept, of some kilobytes each.
const MOST_KEPT: usize = 256;
/// How long the failure of a check is kept.
const FAILED: Duration = Duration::from_secs(600);

/// The checks of a host. A clone is the same checks.
#[derive(Clone)]
pub struct Checks {
    turns: Arc<Semaphore>,
    /// Results by digest; the last requested one is last.
    kept: Arc<Mutex<VecDeque<(String, CheckOutcome)>>>,
}

/// Result of a check and its time; `None` until it has ended.
type CheckOutcome = watch::Receiver<Option<(Instant, Result<Arc<CheckedVersion>, HostError>)>>;

impl Default for Checks {
    fn default() -> Checks {
        Checks { turns: Arc::new(Semaphore::new(AT_A_TIME)), kept: Arc::default() }
    }
}

impl Checks {
    /// Returns the result for this content. Unless it is known, calls `look` in a thread of its own.
    async fn of(
        &self,
        digest: &str,
        look: impl FnOnce() -> Result<CheckedVersion, HostError> + Send + 'static,
    ) -> Result<Arc<CheckedVersion>, HostError> {
        let mut outcome = self.outcome(digest, look);
        let ended = timeout(PATIENCE, outcome.wait_for(Option::is_some)).await;
        let ended = ended.map_err(|_| {
            let message =
                "other images are being checked before it: ask again in a minute; the check continues";
            HostError::new(ErrorCode::Conflict, message)
        })?;
        // The task has ended without a result.
        let fault = || HostError::new(ErrorCode::Internal, "a fault of the daemon: please report this");
        let ended = ended.map_err(|_| fault())?;
        ended.as_ref().map_or_else(|| Err(fault()), |(_, result)| result.clone())
    }

    /// Returns the existing result, known or pending; starts the check if there is none.
    fn outcome(
        &self,
        digest: &str,
        look: impl FnOnce() -> Result<CheckedVersion, HostError> + Send + 'static,
    ) -> CheckOutcome {
        let mut kept = self.kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let at = kept.iter().position(|(of, _)| of == digest);
        let outcome = match at.and_then(|at| kept.remove(at)) {
            Some((_, outcome)) if counts(&outcome) => outcome,
            _ => self.begin(look),
        };
        kept.push_back((digest.to_owned(), outcome.clone()));
        if kept.len() > MOST_KEPT {
            kept.pop_front();
        }
        outcome
    }

    /// Returns the result for this content if its check has ended well. Starts no check.
    fn known(&self, digest: &str) -> Option<Arc<CheckedVersion>> {
        let kept = self.kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (_, outcome) = kept.iter().find(|(of, _)| of == digest)?;
        match &*outcome.borrow() {
            Some((_, Ok(checked))) => Some(Arc::clone(checked)),
            _ => None,
        }
    }

    /// Starts a task that waits for its turn, and runs whether a client waits for it or not.
    fn begin(
        &self,
        look: impl FnOnce() -> Result<CheckedVersion, HostError> + Send + 'static,
    ) -> CheckOutcome {
        let (tell, outcome) = watch::channel(None);
        let turns = Arc::clone(&self.turns);
        tokio::spawn(async move {
            let Ok(_turn) = turns.acquire().await else { return };
            if let Ok(looked) = tokio::task::spawn_blocking(look).await {
                tell.send_replace(Some((Instant::now(), looked.map(Arc::new))));
            }
        });
        outcome
    }
}

/// Whether a result is still valid.
fn counts(outcome: &CheckOutcome) -> bool {
    match &*outcome.borrow() {
        Some((_, Ok(_))) => true,
        // A missing program may be installed at any time.
        Some((when, Err(e))) => e.code != ErrorCode::Unavailable && when.elapsed() < FAILED,
        None => outcome.has_changed().is_ok(),
    }
}

impl Images {
    /// Checks a version, which must be ready, for content that breaks its clones.
    pub async fn check(&self, name: &Name, version: u32) -> Result<ImageCheck, HostError> {
        let (images, asked) = (self.clone(), name.clone());
        let found = tokio::task::spawn_blocking(move || images.to_check(&asked, version));
        let fault = |e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon: {e}"));
        let (version, files, digest) = found.await.map_err(fault)??;
        let checked = self.checks.of(&digest, move || look(&files)).await?;
        Ok(ImageCheck {
            image: name.clone(),
            version: version.version,
            guest: checked.guest,
            windows: checked.windows.clone(),
            volumes: checked.volumes.clone(),
            boot: checked.boot.clone(),
            findings: checked.findings.clone(),
        })
    }

    /// Returns the firmware and the operating system that a version needs: a BIOS and Linux if nothing else is found. Of a streamed
    /// version only its registry knows them, so it is taken for such a one.
    pub fn boot_choice(&self, name: &Name, version: u32) -> Result<BootChoice, HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        if version.residency.is_some() {
            return Ok(BootChoice::default());
        }
        let store = self.store_of(&version)?;
        let disk = File::open(VersionFiles::of(&store.path, name, version.version).disk());
        // Whoever serves the disk says better why it cannot be read.
        Ok(disk.map_or(BootChoice::default(), |disk| check::boot_choice(&disk)))
    }

    /// Returns what earlier checks have found that machines of this catalog cannot do.
    pub fn warnings(&self, catalog: &Catalog) -> Vec<String> {
        [self.boot_warning(catalog), self.domain_warning(catalog)].into_iter().flatten().collect()
    }

    /// Returns a warning if the catalog has no kernel, and an earlier check has found that its version does not boot
    /// without one, or not with its firmware. Starts no check. A record that cannot be read gives no warning: the catalog is changed already.
    fn boot_warning(&self, catalog: &Catalog) -> Option<String> {
        let (image, version) = (&catalog.spec.image.name, catalog.version);
        if catalog.spec.hardware.kernel.is_some() {
            return None;
        }
        let record = self.objects.get::<ImageVersion>(&super::key(image, version)).ok()??;
        let checked = self.checks.known(record.value.digest.as_deref()?)?;
        let firmware = catalog.spec.hardware.firmware;
        let lacks = match firmware {
            Some(Firmware::Bios) if !checked.boot.bios_code => Some("a BIOS"),
            Some(Firmware::Uefi | Firmware::UefiSecure) if !checked.boot.starts_with_uefi() => Some("UEFI"),
            _ => None,
        };
        if let Some(lacks) = lacks {
            return Some(format!(
                "its machines cannot boot {image}:{version}: the disk has no boot loader for {lacks}"
            ));
        }
        let missing = checked.findings.iter().find(|finding| finding.kind == FindingKind::NoBootLoader)?;
        let Finding { what, remedy, .. } = missing;
        Some(format!("its machines cannot boot {image}:{version}: {what}: {remedy}"))
    }

    /// Returns a warning if machines of the catalog are reset, and an earlier check has found that its version is a member of a domain:
    /// one that was published since the catalog was made, for example. Starts no check. A record that cannot be read gives no warning:
    /// the catalog is changed already.
    fn domain_warning(&self, catalog: &Catalog) -> Option<String> {
        if catalog.spec.kind == CatalogKind::Dedicated {
            return None;
        }
        let (image, version) = (&catalog.spec.image.name, catalog.version);
        let record = self.objects.get::<ImageVersion>(&super::key(image, version)).ok()??;
        let checked = self.checks.known(record.value.digest.as_deref()?)?;
        member_in(image, version, &checked.findings)
    }

    /// Refuses a pool of this image if Windows there is a member of a domain. What has not been checked yet is checked for that if the
    /// setting `guest` says that it is Windows, or, without the setting, if it has NTFS. A check that fails, or has to wait too long for
    /// others, is an error: the client may ask again. What nobody can look into, streamed or encrypted, is not refused.
    pub async fn refuse_members(
        &self,
        image: &ImageRef,
        guest: Option<GuestSystem>,
    ) -> Result<(), HostError> {
        let (images, asked) = (self.clone(), image.clone());
        let windows = tokio::task::spawn_blocking(move || images.version_with_windows(&asked, guest)).await;
        // Whoever makes the catalog says better what is wrong with an image or a version that is not there, or not ready.
        let Ok(Ok(Some(version))) = windows else { return Ok(()) };
        let checked = self.check(&image.name, version).await;
        check_members(&image.name, version, checked.map(|checked| checked.findings))
    }

    /// Returns the version that machines would take, if its guest may be Windows and it is here to be checked.
    fn version_with_windows(
        &self,
        image: &ImageRef,
        guest: Option<GuestSystem>,
    ) -> Result<Option<u32>, HostError> {
        let published = || {
            Ok::<_, HostError>(
                self.objects.get::<Image>(image.name.as_str())?.and_then(|image| image.value.published),
            )
        };
        let number = image.version.map_or_else(published, |version| Ok(Some(version.get())))?;
        let Some(number) = number else { return Ok(None) };
        let version = self.objects.change(|changes| self.ready(changes, &image.name, number))?.value;
        if version.residency.is_some() {
            return Ok(None);
        }
        let has_ntfs = || {
            let store = self.store_of(&version)?;
            let disk = File::open(VersionFiles::of(&store.path, &image.name, number).disk());
            Ok::<_, HostError>(disk.is_ok_and(|disk| check::has_ntfs(&disk)))
        };
        let is_windows = match guest {
            Some(guest) => guest == GuestSystem::Windows,
            None => has_ntfs()?,
        };
        Ok(is_windows.then_some(number))
    }

    fn to_check(&self, name: &Name, version: u32) -> Result<(ImageVersion, VersionFiles, String), HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        check_whole(&version, "checked")?;
        let store = self.stores.get(&version.store)?;
        self.stores.check(&store)?;
        let files = VersionFiles::of(&store.path, name, version.version);
        let digest = version.digest.clone();
        let digest = digest.ok_or_else(|| files.damaged("its record has no digest".into()))?;
        Ok((version, files, digest))
    }
}

fn look(files: &VersionFiles) -> Result<CheckedVersion, HostError> {
    let (disk, _) = files.open()?;
    let until = Instant::now() + CHECK;
    check::check(&disk, until).map_err(|why| match Instant::now() < until {
        true => why,
        false => files.damaged(format!("it could not be looked into in {} s", CHECK.as_secs())),
    })
}

/// Refuses a pool by the result of the check of its version.
fn check_members(
    image: &Name,
    version: u32,
    findings: Result<Vec<Finding>, HostError>,
) -> Result<(), HostError> {
    let findings = findings.map_err(|mut why| {
        why.message = format!(
            "{image}:{version} cannot be checked for Windows that is a member of a domain: {}",
            why.message
        );
        why
    })?;
    match member_in(image, version, &findings) {
        Some(message) => Err(HostError::new(ErrorCode::Conflict, message)),
        None => Ok(()),
    }
}

/// Says why a pool of this version cannot work, if it is a member of a domain.
fn member_in(image: &Name, version: u32, findings: &[Finding]) -> Option<String> {
    let Finding { what, remedy, .. } =
        findings.iter().find(|finding| finding.kind == FindingKind::DomainMember)?;
    Some(format!(
        "{image}:{version}: {what}, and pools of members are not supported: a reset brings an old password of the machine account back, \
         and all clones share that account: {remedy}, or take type = dedicated"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    fn nothing() -> Result<CheckedVersion, HostError> {
        let (volumes, boot, findings) = Default::default();
        Ok(CheckedVersion { guest: None, windows: None, volumes, boot, findings })
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_content_is_looked_into_once_and_a_few_at_a_time() {
        let checks = Checks::default();
        let (looked, running) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let most = Arc::new(AtomicUsize::new(0));
        let mut asked = tokio::task::JoinSet::new();
        for n in 0..60 {
            let (checks, looked, running, most) =
                (checks.clone(), looked.clone(), running.clone(), most.clone());
            asked.spawn(async move {
                let look = move || {
                    looked.fetch_add(1, Ordering::SeqCst);
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::yield_now();
                    running.fetch_sub(1, Ordering::SeqCst);
                    nothing()
                };
                checks.of(&format!("digest {}", n % 6), look).await.unwrap();
            });
        }
        asked.join_all().await;
        assert_eq!(looked.load(Ordering::SeqCst), 6);
        assert!(most.load(Ordering::SeqCst) <= AT_A_TIME);
        checks.of("digest 0", || panic!("it is known")).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_nobody_waits_for_any_more_goes_on_and_is_kept() {
        let checks = Checks::default();
        let mut held = Vec::new();
        for n in 0..AT_A_TIME {
            let (begun, has_begun) = tokio::sync::oneshot::channel();
            let (go_on, may_go_on) = mpsc::channel::<()>();
            let checks = checks.clone();
            let asking = tokio::spawn(async move {
                let look = move || {
                    begun.send(()).unwrap();
                    let _ = may_go_on.recv();
                    nothing()
                };
                let _ = checks.of(&format!("slow {n}"), look).await;
            });
            has_begun.await.unwrap();
            asking.abort();
            held.push(go_on);
        }
        assert_eq!(checks.turns.available_permits(), 0);
        drop(held);
        checks.of("other", nothing).await.unwrap();
        for n in 0..AT_A_TIME {
            checks.of(&format!("slow {n}"), || panic!("it is known")).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_failure_is_kept_unless_it_may_pass_at_any_time() {
        let checks = Checks::default();
        let fail = |code| move || Err(HostError::new(code, "why"));
        for _ in 0..2 {
            let missing = checks.of("a", fail(ErrorCode::Unavailable)).await.unwrap_err();
            assert_eq!(missing.code, ErrorCode::Unavailable);
        }
        assert_eq!(checks.of("a", fail(ErrorCode::Damaged)).await.unwrap_err().code, ErrorCode::Damaged);
        let again = checks.of("a", || panic!("it is known")).await.unwrap_err();
        assert_eq!((again.code, again.message.as_str()), (ErrorCode::Damaged, "why"));
    }

    /// A pool is not made because nobody could look.
    #[test]
    fn a_check_that_fails_refuses_a_pool_and_says_why() {
        let image: Name = "desk".parse().unwrap();
        assert!(check_members(&image, 1, Ok(vec![])).is_ok());
        for code in [ErrorCode::Conflict, ErrorCode::Damaged, ErrorCode::Unavailable, ErrorCode::Internal] {
            let refused = check_members(&image, 1, Err(HostError::new(code, "why"))).unwrap_err();
            assert_eq!(refused.code, code);
            assert!(refused.message.starts_with("desk:1") && refused.message.ends_with("why"), "{refused:?}");
        }
    }

    #[tokio::test]
    async fn so_many_are_kept() {
        let checks = Checks::default();
        for n in 0..3 * MOST_KEPT {
            checks.outcome(&n.to_string(), nothing);
            checks.outcome("often", nothing);
        }
        let kept = checks.kept.lock().unwrap();
        assert!(kept.len() == MOST_KEPT && kept.iter().any(|(of, _)| of == "often"));
    }
}
