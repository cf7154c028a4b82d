// built_in.h: the tables that come with onepass. scripts/tables_to_cpp.py writes what is between the marks, from a file
// that `onepass tune --out` wrote.
#pragma once

#include "tables.h"

namespace onepass {

inline const Tables& built_in() {
  [[maybe_unused]] constexpr int kWarp = int(Tier::warp), kFlat = int(Tier::flat), kBlock = int(Tier::block),
                                 kCluster = int(Tier::cluster), kGrid = int(Tier::grid), kStream = int(Tier::stream);
  // clang-format off
  // begin: NVIDIA H200, 2026-11-21
  static const Tables tables = {
      "built in, measured on NVIDIA H200, 2026-11-21",
      {
          // rows32
          {5, kWarp, 1, 0, 1, 0},
          {27, kWarp, 2, 0, 1, 0},
          {55, kWarp, 4, 0, 1, 0},
          {71, kWarp, 8, 0, 1, 0},
          {97, kWarp, 4, 0, 1, 0},
          {119, kWarp, 8, 0, 1, 0},
          {143, kWarp, 16, 0, 1, 0},
          {211, kWarp, 8, 0, 1, 0},
          {429, kWarp, 16, 0, 1, 0},
          {506, kWarp, 32, 0, 1, 0},
          {3318, kBlock, 0, 32, 1, 0},
          {5608, kBlock, 0, 24, 1, 0},
          {6144, kBlock, 0, 16, 1, 0},
          {7662, kBlock, 0, 24, 1, 0},
          {11217, kCluster, 0, 24, 2, 0},
          {13478, kCluster, 0, 32, 4, 0},
          {21908, kCluster, 128, 20, 4, 8},
          {32000, kCluster, 0, 32, 4, 0},
          {34755, kCluster, 0, 32, 8, 0},
          {47555, kCluster, 128, 20, 8, 8},
          {61303, kCluster, 160, 24, 8, 8},
          {69167, kCluster, 0, 32, 16, 0},
          {76896, kCluster, 0, 24, 8, 8},
          {94868, kCluster, 128, 24, 16, 8},
          {160714, kCluster, 128, 20, 16, 12},
          {199749, kCluster, 192, 24, 16, 12},
          {219772, kCluster, 0, 20, 16, 16},
          {324037, kCluster, 256, 24, 16, 16},
          {428952, kCluster, 320, 24, 16, 16},
          {491093, kCluster, 0, 20, 16, 16},
          {589821, kCluster, 0, 24, 16, 12},
          {kAnyLength, kGrid, 480, 16, 1, 0},
      },
      {
          // rows16
          {11, kWarp, 1, 0, 1, 0},
          {55, kWarp, 2, 0, 1, 0},
          {119, kWarp, 4, 0, 1, 0},
          {239, kWarp, 8, 0, 1, 0},
          {478, kWarp, 16, 0, 1, 0},
          {572, kWarp, 32, 0, 1, 0},
          {701, kWarp, 16, 0, 1, 0},
          {1011, kWarp, 32, 0, 1, 0},
          {1517, kBlock, 0, 48, 1, 0},
          {4097, kBlock, 0, 40, 1, 0},
          {4161, kBlock, 0, 48, 1, 0},
          {4650, kBlock, 0, 40, 1, 0},
          {6144, kBlock, 0, 32, 1, 0},
          {8193, kBlock, 0, 40, 1, 0},
          {8257, kBlock, 0, 48, 1, 0},
          {13478, kBlock, 0, 40, 1, 0},
          {16385, kCluster, 0, 48, 2, 0},
          {17379, kBlock, 320, 40, 1, 4},
          {19200, kCluster, 192, 32, 2, 4},
          {85381, kCluster, 128, 48, 4, 4},
          {199749, kCluster, 128, 32, 8, 12},
          {259053, kCluster, 256, 48, 8, 12},
          {324037, kCluster, 160, 48, 16, 12},
          {491093, kCluster, 192, 48, 16, 16},
          {1048576, kCluster, 0, 48, 16, 12},
          {1100000, kCluster, 480, 48, 16, 12},
          {kAnyLength, kGrid, 480, 32, 1, 0},
      },
      {
          // reduce32
          {27, kWarp, 1, 0, 1, 0},
          {43, kWarp, 2, 0, 1, 0},
          {119, kWarp, 4, 0, 1, 0},
          {320, kWarp, 8, 0, 1, 0},
          {640, kWarp, 16, 0, 1, 0},
          {1280, kWarp, 32, 0, 1, 0},
          {4650, kBlock, 0, 32, 1, 0},
          {7662, kStream, 64, 16, 1, 0},
          {8193, kBlock, 0, 32, 1, 0},
          {8756, kStream, 64, 8, 1, 0},
          {9714, kStream, 128, 24, 1, 0},
          {12478, kStream, 128, 16, 1, 0},
          {15325, kStream, 64, 16, 1, 0},
          {25922, kStream, 128, 16, 1, 0},
          {61303, kStream, 256, 16, 1, 0},
          {76896, kStream, 256, 24, 1, 0},
          {85381, kStream, 256, 16, 1, 0},
          {104880, kStream, 256, 24, 1, 0},
          {118777, kStream, 512, 24, 1, 0},
          {141118, kStream, 512, 8, 1, 0},
          {179722, kStream, 512, 16, 1, 0},
          {374165, kStream, 1024, 8, 1, 0},
          {428952, kStream, 512, 24, 1, 0},
          {491093, kStream, 256, 16, 1, 0},
          {1048576, kStream, 1024, 8, 1, 0},
          {kAnyLength, kGrid, 480, 16, 1, 0},
      },
      {
          // reduce16
          {55, kWarp, 1, 0, 1, 0},
          {119, kWarp, 4, 0, 1, 0},
          {143, kWarp, 8, 0, 1, 0},
          {239, kWarp, 4, 0, 1, 0},
          {512, kWarp, 8, 0, 1, 0},
          {1024, kWarp, 16, 0, 1, 0},
          {2048, kWarp, 32, 0, 1, 0},
          {8193, kBlock, 0, 64, 1, 0},
          {8257, kStream, 128, 16, 1, 0},
          {16385, kBlock, 0, 64, 1, 0},
          {32382, kBlock, 192, 64, 1, 8},
          {47555, kCluster, 256, 64, 2, 4},
          {69167, kCluster, 256, 56, 2, 12},
          {76896, kCluster, 0, 64, 4, 4},
          {85381, kCluster, 0, 64, 8, 4},
          {104880, kCluster, 128, 56, 8, 8},
          {160714, kCluster, 128, 64, 8, 12},
          {199749, kCluster, 0, 64, 8, 8},
          {242652, kCluster, 256, 56, 8, 8},
          {280433, kCluster, 0, 64, 8, 8},
          {374165, kStream, 1024, 16, 1, 0},
          {428952, kCluster, 0, 64, 16, 12},
          {1048576, kStream, 1024, 16, 1, 0},
          {1100000, kCluster, 480, 48, 16, 12},
          {kAnyLength, kGrid, 480, 32, 1, 0},
      },
      {
          // odd32
          {40, kFlat, 1, 0, 1, 0},
          {175, kFlat, 4, 0, 1, 0},
          {289, kFlat, 8, 0, 1, 0},
          {kAnyLength, kAsRows, 0, 0, 1, 0},
      },
      {
          // odd16
          {40, kFlat, 1, 0, 1, 0},
          {175, kFlat, 4, 0, 1, 0},
          {369, kFlat, 8, 0, 1, 0},
          {453, kFlat, 16, 0, 1, 0},
          {1369, kFlat, 32, 0, 1, 0},
          {kAnyLength, kAsRows, 0, 0, 1, 0},
      },
  };
  // end
  // clang-format on
  return tables;
}

}  // namespace onepass
