//! [`Arch`]: what kernels are compiled for.

use std::str::FromStr;

/// Architecture of a device, such as sm_90a.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch(u32);

impl Arch {
    /// The oldest that kernels run on: asynchronous copies and bf16 products begin with it.
    pub const OLDEST: Self = Self(80);
    /// Clusters, the copy engine and warpgroup products begin with it.
    pub const HOPPER: Self = Self(90);
    /// The ones that every kernel is compiled for before a release.
    pub const ALL: [Self; 6] = [Self(80), Self(86), Self(89), Self(90), Self(100), Self(120)];

    /// Of a compute capability.
    pub const fn of(major: u32, minor: u32) -> Self {
        Self(major * 10 + minor)
    }

    /// Streaming multiprocessors and shared memory of a block of a common device of it, for plans without a device.
    pub(crate) fn typical(self) -> (u32, u32) {
        match self.0 {
            80 => (108, 166_912),
            86 => (84, 101_376),
            89 => (142, 101_376),
            90 => (132, 232_448),
            100..120 => (148, 232_448),
            _ => (170, 101_376),
        }
    }
}

/// From sm_90 on the form with all of the device's own instructions is meant.
impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}{}", self.0, if *self >= Self::HOPPER { "a" } else { "" })
    }
}

impl FromStr for Arch {
    type Err = ();

    fn from_str(s: &str) -> Result<Self, ()> {
        let number = s.strip_prefix("sm_").ok_or(())?;
        let arch = Self(number.trim_end_matches('a').parse().map_err(drop)?);
        if arch.to_string() == s && arch >= Self::OLDEST { Ok(arch) } else { Err(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for arch in Arch::ALL {
            assert_eq!(arch.to_string().parse(), Ok(arch));
        }
        assert_eq!(Arch::of(9, 0).to_string(), "sm_90a");
        for bad in ["sm_90", "sm_80a", "sm_70", "90a", "sm_", "sm_-80", "sm_90aa"] {
            assert_eq!(bad.parse::<Arch>(), Err(()), "{bad}");
        }
    }
}
