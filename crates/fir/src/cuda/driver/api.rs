//! libcuda: its functions, looked up by name, and how they are called.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::launch::Config;
use crate::error::{Error, Result};

/// A struct of functions that a shared library must have, all of which answer an integer.
macro_rules! library {
    ($(#[$doc:meta])* struct $name:ident { $($function:ident($($arg:ty),*);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(super) struct $name {
            $(pub(super) $function: unsafe extern "C" fn($($arg),*) -> i32,)*
        }
        impl $name {
            /// Looks every function up; the name of the first that is not there.
            ///
            /// # Safety
            /// The library's functions of these names have these types, and `library` is never closed.
            unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($function: *unsafe { library.get(stringify!($function)) }
                        .map_err(|_| stringify!($function))?,)*
                })
            }
        }
    };
}
pub(in super::super) use library;

/// An opaque pointer of the driver's.
pub(super) type Handle = *mut c_void;

library! {
    struct Api {
        cuCtxGetCurrent(*mut Handle);
        cuCtxPopCurrent_v2(*mut Handle);
        cuCtxPushCurrent_v2(Handle);
        cuDeviceGet(*mut i32, i32);
        cuDeviceGetAttribute(*mut i32, i32, i32);
        cuDeviceGetCount(*mut i32);
        cuDeviceGetDefaultMemPool(*mut Handle, i32);
        cuDeviceGetName(*mut c_char, i32, i32);
        cuDevicePrimaryCtxRelease_v2(i32);
        cuDevicePrimaryCtxRetain(*mut Handle, i32);
        cuDeviceTotalMem_v2(*mut usize, i32);
        cuDriverGetVersion(*mut i32);
        cuEventCreate(*mut Handle, u32);
        cuEventDestroy_v2(Handle);
        cuEventElapsedTime(*mut f32, Handle, Handle);
        cuEventRecord(Handle, Handle);
        cuEventSynchronize(Handle);
        cuFuncGetAttribute(*mut i32, i32, Handle);
        cuFuncSetAttribute(Handle, i32, i32);
        cuGetErrorName(i32, *mut *const c_char);
        cuGraphDestroy(Handle);
        cuGraphExecDestroy(Handle);
        cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
        cuGraphLaunch(Handle, Handle);
        cuInit(u32);
        cuLaunchKernelEx(*const Config, Handle, *mut *mut c_void, *mut *mut c_void);
        cuMemAllocAsync(*mut u64, usize, Handle);
        cuMemAllocHost_v2(*mut *mut c_void, usize);
        cuMemAlloc_v2(*mut u64, usize);
        cuMemFreeAsync(u64, Handle);
        cuMemFreeHost(*mut c_void);
        cuMemFree_v2(u64);
        cuMemPoolGetAttribute(Handle, i32, *mut c_void);
        cuMemPoolSetAttribute(Handle, i32, *mut c_void);
        cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
        cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
        cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
        cuMemsetD8Async(u64, u8, usize, Handle);
        cuModuleGetFunction(*mut Handle, Handle, *const c_char);
        cuModuleLoadData(*mut Handle, *const c_void);
        cuModuleUnload(Handle);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut i32, Handle, i32, usize);
        cuStreamBeginCapture_v2(Handle, i32);
        cuStreamCreate(*mut Handle, u32);
        cuStreamDestroy_v2(Handle);
        cuStreamEndCapture(Handle, *mut Handle);
        cuStreamIsCapturing(Handle, *mut i32);
        cuStreamSynchronize(Handle);
        cuStreamWaitEvent(Handle, Handle, u32);
        cuTensorMapEncodeTiled(
            *mut c_void, i32, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32, i32, i32, i32, i32
        );
    }
}

/// The driver's functions, or why there are none.
pub(super) fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(|| {
        let missing =
            |got: String, hint: &str| Error::Unavailable { what: "a CUDA device".into(), got, hint: hint.into() };
        // SAFETY: the driver's library runs no code of ours when it is loaded.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }
            .map_err(|e| missing(e.to_string(), "an NVIDIA driver is needed, 525 or newer"))?;
        // Never closed: kernels and memory may outlive every value that we could tie it to.
        let library = Box::leak(Box::new(library));
        // SAFETY: these are the types of cuda.h, and the library was leaked.
        let api = unsafe { Api::load(library) }.map_err(|name| {
            missing(format!("libcuda.so.1 has no {name}"), "an NVIDIA driver of 525 or newer is needed")
        })?;
        // SAFETY: plain call of the first function that must be called.
        api.check("cuInit", unsafe { (api.cuInit)(0) })
            .map_err(|e| missing(e.to_string(), "see whether `nvidia-smi` lists a device"))?;
        Ok(api)
    })
    .as_ref()
    .map_err(Clone::clone)
}

impl Api {
    pub(super) fn check(&self, call: &'static str, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the driver writes a pointer to one of its constants, or null for a code it does not know.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: `name` is one of the driver's constant strings.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "unknown".into()
        };
        Err(Error::Driver { call, code, name })
    }
}

/// Calls a function of the driver and checks its answer.
macro_rules! call {
    ($api:expr, $function:ident($($arg:expr),* $(,)?)) => {{
        let api = $api;
        // SAFETY: every pointer below is to a live value of the type that the function writes or reads, every handle is
        // one that the driver gave us and that its owner has not freed; the context is current where it has to be.
        let code = unsafe { (api.$function)($($arg),*) };
        api.check(stringify!($function), code)
    }};
}
pub(super) use call;
