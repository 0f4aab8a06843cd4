//! The picture over time: a line for each scenario, in its band.
//!
//! Invariant: where nothing is known nothing is drawn; the legend stands over the data, never on it.

use super::figures::Spread;
use crate::numbers::{number, times};
use crate::picture::{Area, Axis, CHARACTER, Picture, Role, cut, draw_point, draw_text};
use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

const WIDTH: u32 = 1000;
const HEIGHT: u32 = 560;
const ROW: i32 = 40;
/// Marks on each line.
const MARKS: usize = 6;

/// One scenario.
pub struct Line<'a> {
    /// Its name.
    pub name: String,
    /// Its place in the study: its colour and its mark.
    pub place: usize,
    /// By time.
    pub points: &'a [Option<Spread>],
}

/// Draws them. `step` seconds lie between two points.
pub fn draw(label: &str, unit: &str, step: usize, lines: &[Line]) -> Result<Picture> {
    let legend = legend(lines);
    let head = 44 + ROW * legend.last().map_or(0, |entry| entry.row + 1);
    Picture::draw(label, (WIDTH, HEIGHT + head as u32), |root| {
        let axis = axis(lines);
        let note = if axis.is_log() { " (each mark is a power of ten)" } else { "" };
        draw_text(root, &format!("{unit}{note}"), (8, 22), Role::Ink, HPos::Left)?;
        for entry in &legend {
            let y = 44 + ROW * entry.row + ROW / 2;
            let colour = Role::Series(entry.place).colour();
            root.draw(&PathElement::new(vec![(entry.x, y), (entry.x + 56, y)], colour.stroke_width(5)))?;
            draw_point(root, (entry.x + 28, y), entry.place)?;
            draw_text(root, &entry.name, (entry.x + 68, y), Role::Ink, HPos::Left)?;
        }
        plot(root, head, step, &axis, lines)
    })
}

fn plot(root: &Area, head: i32, step: usize, axis: &Axis, lines: &[Line]) -> Result<()> {
    let length = lines.iter().map(|line| line.points.len()).max().unwrap_or(0);
    let end = (length * step).max(1) as f64;
    let (low, high) = axis.ends();
    let labels = axis.marks().iter().map(|mark| axis.label(*mark).chars().count()).max().unwrap_or(1);
    let mut chart = ChartBuilder::on(root)
        .margin_top(head + 14)
        .margin_right(34)
        .margin_left(labels as i32 * CHARACTER + 26)
        .margin_bottom(92)
        .build_cartesian_2d(0.0..end, low..high)?;
    let grid = Role::Grid.colour().stroke_width(2);
    for &mark in axis.marks() {
        let (from, to) = (chart.backend_coord(&(0.0, mark)), chart.backend_coord(&(end, mark)));
        root.draw(&PathElement::new(vec![from, to], grid))?;
        draw_text(root, &axis.label(mark), (from.0 - 14, from.1), Role::Soft, HPos::Right)?;
    }
    let (marks, unit, name) = times(end);
    for mark in marks {
        let (x, y) = chart.backend_coord(&(mark, low));
        root.draw(&PathElement::new(vec![(x, y), (x, y + 10)], grid))?;
        draw_text(root, &number(mark / unit), (x, y + 28), Role::Soft, HPos::Center)?;
    }
    let (x, y) = chart.backend_coord(&(end / 2.0, low));
    draw_text(root, &format!("time, {name}"), (x, y + 66), Role::Soft, HPos::Center)?;
    let middle = |i: usize| (i as f64 + 0.5) * step as f64;
    for line in lines {
        let colour = Role::Series(line.place).colour();
        for run in stretches(line.points, axis) {
            let low = run.iter().map(|(i, spread)| (middle(*i), axis.place(spread.low)));
            let high = run.iter().rev().map(|(i, spread)| (middle(*i), axis.place(spread.high)));
            if run.iter().any(|(_, spread)| spread.runs > 1) {
                let band: Vec<(f64, f64)> = low.chain(high).collect();
                chart.draw_series([Polygon::new(band, colour.mix(0.18))])?;
            }
        }
    }
    for (nth, line) in lines.iter().enumerate() {
        let colour = Role::Series(line.place).colour();
        for run in stretches(line.points, axis) {
            let places: Vec<(f64, f64)> =
                run.iter().map(|(i, spread)| (middle(*i), axis.place(spread.mean))).collect();
            if let [only] = places[..] {
                draw_point(root, chart.backend_coord(&only), line.place)?;
            }
            chart.draw_series(LineSeries::new(places, colour.stroke_width(4)))?;
        }
        // Each line's marks are elsewhere, so that lines that lie on one another can be told apart.
        for k in 0..MARKS {
            let share = (k as f64 + (nth as f64 + 0.5) / lines.len() as f64) / MARKS as f64;
            let i = (share * line.points.len() as f64) as usize;
            let point = line.points.get(i).copied().flatten().filter(|spread| axis.has(spread.mean));
            if let Some(spread) = point {
                draw_point(root, chart.backend_coord(&(middle(i), axis.place(spread.mean))), line.place)?;
            }
        }
    }
    Ok(())
}

/// Points that follow each other without a gap.
fn stretches(points: &[Option<Spread>], axis: &Axis) -> Vec<Vec<(usize, Spread)>> {
    let mut all = vec![Vec::new()];
    for (i, point) in points.iter().enumerate() {
        match (point.filter(|spread| axis.has(spread.mean)), all.last_mut()) {
            (Some(spread), Some(last)) => last.push((i, spread)),
            _ => all.push(Vec::new()),
        }
    }
    all.retain(|run| !run.is_empty());
    all
}

struct Entry {
    name: String,
    place: usize,
    x: i32,
    row: i32,
}

/// Names side by side, in as many rows as they need.
fn legend(lines: &[Line]) -> Vec<Entry> {
    let (mut x, mut row) = (8, 0);
    let mut entries = Vec::new();
    for line in lines {
        let name = cut(&line.name, 54);
        let width = 68 + name.chars().count() as i32 * CHARACTER + 30;
        if x > 8 && x + width > WIDTH as i32 {
            (x, row) = (8, row + 1);
        }
        entries.push(Entry { name, place: line.place, x, row });
        x += width;
    }
    entries
}

/// From 0 on, or by powers of ten where the scenarios lie too far apart to be seen together.
fn axis(lines: &[Line]) -> Axis {
    let all = || lines.iter().flat_map(|line| line.points.iter().flatten());
    let most = all().map(|spread| spread.high).fold(0.0, f64::max);
    let mean = |line: &Line| {
        let known: Vec<f64> = line.points.iter().flatten().map(|spread| spread.mean).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    };
    let least = lines.iter().filter_map(mean).fold(f64::INFINITY, f64::min);
    let zeros = all().filter(|spread| spread.low <= 0.0).count();
    let is_log = least > 0.0 && most > 300.0 * least && zeros * 20 <= all().count();
    if !is_log {
        return Axis::linear(most);
    }
    let lowest = all().map(|spread| spread.low).filter(|low| *low > 0.0).fold(f64::INFINITY, f64::min);
    // One slow second must not take half of the picture.
    Axis::log(lowest.max(least / 100.0), most)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The points of a line, each of so many runs.
    fn points(values: &[Option<f64>], runs: usize) -> Vec<Option<Spread>> {
        let spread = |mean: f64| Spread { mean, low: mean * 0.9, high: mean * 1.1, runs };
        values.iter().map(|value| value.map(spread)).collect()
    }

    fn line<'a>(name: &str, place: usize, points: &'a [Option<Spread>]) -> Line<'a> {
        Line { name: name.into(), place, points }
    }

    #[test]
    fn gaps_break_lines_and_bands() {
        let points = points(&[Some(1.0), Some(2.0), None, Some(3.0), Some(4.0), None, Some(1.0)], 2);
        let svg = draw("t", "reads/s", 1, &[line("a", 1, &points)]).unwrap().body;
        let with = |class: &str, tag: &str| {
            svg.lines().filter(|l| l.contains(class) && l.starts_with(&format!("<{tag} "))).count()
        };
        // Two lines and the legend's; three bands are filled.
        assert_eq!(with("l-s1", "polyline"), 4, "{svg}");
        assert!(svg.contains("opacity=\"0.18\" fill=\"#0072B2\" class=\"f-s1\""), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("<script"));
    }

    #[test]
    fn one_run_has_no_band() {
        let points = points(&[Some(1.0), Some(2.0)], 1);
        let svg = draw("t", "reads/s", 1, &[line("<script>", 0, &points)]).unwrap().body;
        assert!(!svg.contains("0.18") && svg.contains("&lt;script&gt;"), "{svg}");
    }

    #[test]
    fn scenarios_far_apart_are_shown_by_powers_of_ten() {
        let [slow, fast, none] = [459.0, 400_000.0, 0.0].map(|value| points(&[Some(value); 9], 2));
        let far = [line("a", 0, &slow), line("b", 1, &fast)];
        assert!(axis(&far).is_log());
        let zero = [line("a", 0, &none), line("b", 1, &fast)];
        assert!(!axis(&zero).is_log());
        assert!(!axis(&[line("a", 0, &[])]).is_log());
        for lines in [&far[..], &zero[..], &[]] {
            draw("t", "x", 7, lines).unwrap();
        }
    }
}
