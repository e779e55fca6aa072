//! A schedule as a picture: a lane per worker, as wide as its work, in blocks by request.

use std::fmt::Write;

use fir::attention::{Item, Schedule};

/// What the terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// ASCII, no escape codes.
    Plain,
    /// Escape codes and Unicode.
    Color,
}

impl Style {
    /// `text` in bold.
    pub(crate) fn bold(self, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Color => format!("\x1b[1m{text}\x1b[0m"),
        }
    }

    /// `text` on the colour of `name`.
    fn on(self, name: char, text: &str) -> String {
        // Light colours of the 256-colour cube, neighbours apart; the text on them is black.
        const PALETTE: [u8; 16] = [110, 117, 120, 229, 216, 183, 159, 157, 222, 210, 147, 215, 114, 250, 181, 152];
        match self {
            Self::Plain => text.to_owned(),
            Self::Color => format!("\x1b[30;48;5;{}m{text}\x1b[0m", PALETTE[name as usize % PALETTE.len()]),
        }
    }

    /// A request's name on its colour.
    pub(crate) fn name(self, name: char) -> String {
        self.on(name, &name.to_string())
    }
}

/// Most lanes drawn.
const MAX_LANES: usize = 24;

/// A piece of a head that was cut between workers.
const CUT: char = '/';

/// A cell of a lane: whose work it is, and whether on a piece of a head.
type Cell = Option<(char, bool)>;

/// One lane of `width` cells per worker, the busiest one's full. A block is named by its request's entry of `names`;
/// pieces of heads that were cut between workers are marked, however small.
pub(crate) fn picture(schedule: &Schedule, names: &[char], width: usize, style: Style) -> String {
    let workers = schedule.workers();
    let total: u64 = (0..workers).map(|w| schedule.cost(w)).sum();
    let widest = (0..workers).map(|w| schedule.cost(w)).max().unwrap_or(0).max(1);
    let bar = if style == Style::Color { '│' } else { '|' };
    let mut text = String::new();
    for w in 0..workers.min(MAX_LANES) {
        let lane = blocks(&lane(schedule, w, names, width, widest), style);
        let share = schedule.cost(w) as f64 * 100.0 / total.max(1) as f64;
        let _ = writeln!(text, "  worker {w:<2} {bar}{lane}{bar} {share:4.1} %");
    }
    if workers > MAX_LANES {
        let _ = writeln!(text, "  and {} more workers", workers - MAX_LANES);
    }
    text
}

fn lane(schedule: &Schedule, w: usize, names: &[char], width: usize, widest: u64) -> Vec<Cell> {
    let mut cells = vec![None; width];
    let mut done = 0;
    // Cells from `from` on, in the item's proportion.
    let mut spans: Vec<(&Item, usize, usize)> = vec![];
    let column = |cost: u64| ((cost * width as u64 + widest / 2) / widest) as usize;
    for item in schedule.of(w) {
        let from = column(done);
        done += schedule.item_cost(item);
        spans.push((item, from, column(done)));
    }
    let name = |item: &Item| names.get(item.request as usize).copied().unwrap_or('?');
    for &(item, from, to) in spans.iter().filter(|s| s.0.partial == Item::WHOLE) {
        cells[from..to].fill(Some((name(item), false)));
    }
    for &(item, from, to) in spans.iter().filter(|s| s.0.partial != Item::WHOLE) {
        // A piece narrower than a cell takes one all the same.
        let from = from.min(width.saturating_sub(1));
        cells[from..to.max(from + 1).min(width)].fill(Some((name(item), true)));
    }
    cells
}

fn blocks(cells: &[Cell], style: Style) -> String {
    let mut text = String::new();
    for run in cells.chunk_by(|a, b| a == b) {
        let n = run.len();
        match (run[0], style) {
            (None, _) => text.extend(std::iter::repeat_n(' ', n)),
            (Some((name, true)), _) => text += &style.on(name, &CUT.to_string().repeat(n)),
            (Some((name, false)), Style::Plain) => text.extend(std::iter::repeat_n(name, n)),
            (Some((name, false)), Style::Color) => text += &style.on(name, &format!("{name:^n$}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use fir::attention::{BatchPlan, Problem, Split};
    use fir::exec::Level;
    use fir::{DType, Exec, Ragged, variant};

    use super::*;

    fn schedule(workers: usize, kv_lens: &[u32], split: Split) -> Schedule {
        let exec = Exec::cpu_with(Level::available()[0], workers).unwrap();
        let problem = Problem::new(4, 2, 64, DType::F32, variant::standard());
        let qo = Ragged::ones(kv_lens.len()).unwrap();
        BatchPlan::new(&exec, problem, &qo, kv_lens, split).unwrap().schedule().clone()
    }

    #[test]
    fn a_lane_is_as_wide_as_its_work() {
        // One worker, 640 and 1920 positions: a quarter and three quarters.
        let s = schedule(1, &[640, 1920], Split::Balanced);
        assert_eq!(picture(&s, &['a', 'b'], 12, Style::Plain), "  worker 0  |aaabbbbbbbbb| 100.0 %\n");
        // Uncut heads over two workers: request a alone has more work than b.
        let s = schedule(2, &[1280, 640], Split::Off);
        let text = picture(&s, &['a', 'b'], 8, Style::Plain);
        assert_eq!(text.lines().count(), 2);
        assert!(text.contains('|') && !text.contains(CUT), "{text}");
    }

    #[test]
    fn cut_heads_are_marked_on_both_sides() {
        // Three equal shares of two heads: each head is cut.
        let s = schedule(3, &[64 * 300], Split::Balanced);
        assert_eq!(
            picture(&s, &['a'], 10, Style::Plain),
            "  worker 0  |//////////| 33.3 %\n  worker 1  |//////////| 33.3 %\n  worker 2  |//////////| 33.3 %\n"
        );
        // A piece of a head that is less than a cell wide still shows.
        let s = schedule(2, &[6400, 6400, 6400, 64], Split::Balanced);
        assert!(!s.merges().is_empty());
        let text = picture(&s, &['a', 'b', 'c', 'd'], 6, Style::Plain);
        assert_eq!(text.lines().filter(|l| l.contains(CUT)).count(), 2, "{text}");
    }

    #[test]
    fn idle_workers_empty_batches_and_missing_names_are_drawn() {
        let s = schedule(2, &[], Split::Balanced);
        assert_eq!(picture(&s, &[], 4, Style::Plain), "  worker 0  |    |  0.0 %\n  worker 1  |    |  0.0 %\n");
        let s = schedule(1, &[64], Split::Balanced);
        assert_eq!(picture(&s, &[], 4, Style::Plain), "  worker 0  |????| 100.0 %\n");
        assert_eq!(picture(&s, &['a'], 0, Style::Plain), "  worker 0  || 100.0 %\n");
        assert!(picture(&s, &['a'], 5, Style::Color).contains("m  a  \x1b[0m"));
        let text = picture(&schedule(30, &[6400], Split::Balanced), &['a'], 4, Style::Plain);
        assert_eq!(text.lines().last(), Some("  and 6 more workers"));
    }
}
